"""The one exception for mistakes that the user can mend.

The command line prints a `UserError` without a traceback and exits with code 2; anything else is a bug of
ours and keeps its traceback. Notebooks may catch it as the `ValueError` that it is.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """What is wrong, what was received, what is allowed, what to do.

    Args:
        what: One sentence that names the recipe key, column, file or table concerned.
        received: The value that was found, shown with `repr` when it is not already text.
        allowed: The values or limits that would have been accepted.
        fix: What to do now, as an imperative.

    Attributes:
        is_printed_here: False where another rank raises the very same error and prints it.
        is_worth_retrying: Whether the same job may do better when a launcher starts it again.
    """

    is_printed_here = True
    is_worth_retrying = False

    def __init__(self, what: str, *, received: object = None, allowed: object = None, fix: str | None = None) -> None:
        self.what, self.received, self.allowed, self.fix = what, received, allowed, fix
        text = what if what.endswith("?") else what.rstrip(".") + "."
        for title, value in (("Received", received), ("Allowed", allowed), ("Do", fix)):
            if value is not None:
                shown = value if isinstance(value, str) else repr(value)
                text += f" {title}: {shown.rstrip('.')}."
        super().__init__(text)

    @classmethod
    def collect(cls, title: str, problems: list[str], fix: str | None = None) -> "UserError":
        """One error that lists every problem on a line of its own, and last what to do."""
        count = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
        return cls("\n  - ".join([f"{title} ({count}):", *problems]) + (f"\n  Do: {fix}" if fix else ""))


def nearest_name(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that is close, upper and lower case being the same; None where none is."""
    by_lower = {candidate.lower(): candidate for candidate in allowed}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[near[0]] if near else None


def nearest(name: str, allowed: Iterable[str]) -> str:
    """` Did you mean 'x'?` when one of the allowed names is close, else nothing."""
    near = nearest_name(name, allowed)
    return f" Did you mean {near!r}?" if near is not None else ""
