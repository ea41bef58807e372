"""The commands of the command line, one a module; torch is imported when a command runs."""
