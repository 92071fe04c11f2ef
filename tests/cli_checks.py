"""What the tests of several `mesh-cp` commands check alike."""

from __future__ import annotations

from collections.abc import Iterable


def assert_refused(capsys, says: Iterable[str]) -> None:
    """Nothing on stdout, and one error line that says all of this; the command has just ended."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mesh-cp: error: ")
    assert err.count("\n") == 1
    for word in says:
        assert word in err
