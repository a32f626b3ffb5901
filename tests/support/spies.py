"""`failing`: a function some of whose calls fail."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import DEFAULT, Mock


def failing(function: Callable[..., Any], error: BaseException, *calls: int) -> Mock:
    """`function`, whose calls of these numbers, counted from 0, raise `error`."""
    return Mock(wraps=function, side_effect=(error if call in calls else DEFAULT for call in count()))
