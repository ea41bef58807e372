"""What planted faults are made of: right outputs, edits of rows, plants of whole outputs."""
