"""Text from outside, safe to print: what is not printable is escaped, what is endless is cut."""

MOST = 400


def line(text: object, *, most: int = MOST) -> str:
    """One printable line: control, direction and lone surrogate characters as escapes."""
    whole = str(text)
    cut = f"... ({len(whole):,} characters)" if len(whole) > most else ""
    return _escaped(whole[:most]) + cut


def block(text: str) -> str:
    """Printable lines of any length; line ends stay."""
    return "\n".join(_escaped(part) for part in text.split("\n"))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
