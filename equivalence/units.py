"""Counts and bytes in words."""

_KIB = 1024


def size(count: int) -> str:
    """Bytes with a binary unit: 337 KiB, 2.0 GiB."""
    if count < _KIB // 2:
        return many(count, "byte")
    kib = count / _KIB
    if kib < _KIB:
        return f"{kib:,.0f} KiB"
    mib = kib / _KIB
    return f"{mib:,.1f} MiB" if mib < _KIB else f"{mib / _KIB:,.2f} GiB"


def many(count: int, noun: str) -> str:
    """A counted noun: 1 row, 2 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
