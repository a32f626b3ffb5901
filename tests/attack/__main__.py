"""The attack as a command: ``python -m tests.attack --minutes 10 --seed 1``; exits with 1 if it finds a difference."""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field

import torch
from transformers import logging

from .areas import AREAS, cases
from .histories import differing_fields
from .judge import Account
from .runner import safely

_MINUTES_TO_COMPILE = 5  # in less, compiling alone would take the time of all others


@dataclass
class Tally:
    """The results of one area."""

    account: Account = field(default_factory=Account)
    seconds: float = 0.0
    worlds: int = 0
    refused: int = 0
    histories: int = 0
    wrong: int = 0

    def line(self, area: str) -> str:
        got = self.account
        return (
            f"{area:10} {self.seconds:4.0f} s {self.worlds - self.refused:4} models {self.histories:5} histories "
            f"{got.num_preempted:5} preemptions {got.num_raised:5} raised {got.num_tokens:7} tokens "
            f"{got.num_logits:7} logits {got.num_ties:3} ties {self.wrong:5} wrong"
        )


class Attack:
    """Goes through the areas, world by world, until the time is up.

    Args:
        seed: of everything.
        areas: which.
        seconds: how long.
    """

    def __init__(self, seed: int, areas: list[str], seconds: float) -> None:
        self.seed, self.seconds = seed, seconds
        self.tallies = {area: Tally() for area in areas}

    def run(self) -> None:
        start = shown = time.monotonic()
        while time.monotonic() - start < self.seconds:
            area = min(self.tallies, key=lambda area: self.tallies[area].seconds / (AREAS[area].share or 0.1))
            tally, begun = self.tallies[area], time.monotonic()
            self._world(area, f"{self.seed}.{tally.worlds}", tally)
            tally.seconds += time.monotonic() - begun
            if time.monotonic() - shown > 10:
                shown, tallies = time.monotonic(), self.tallies.values()
                counts = f"{sum(t.histories for t in tallies)} histories, {sum(t.wrong for t in tallies)} wrong"
                print(f"  {min((shown - start) / self.seconds, 1):4.0%} {counts}; {area}", flush=True)

    def _world(self, area: str, seed: str, tally: Tally) -> None:
        tally.worlds += 1
        empty = True
        for case, world, history in cases(area, seed):
            empty = False
            account = safely(world, history)
            tally.histories += 1
            tally.account.add(account)
            if account.differences:
                tally.wrong += 1
                told = f"{case.name}, {world.name}: {account.differences[0]}\n    {differing_fields(history)}"
                print(f"  {told}\n    again: python -m tests.attack --case {case.name}", flush=True)
        tally.refused += empty

    def close(self) -> int:
        """Tell all of it. Returns how many histories went wrong."""
        print()
        for area, tally in self.tallies.items():
            print(tally.line(area))
        wrong = sum(tally.wrong for tally in self.tallies.values())
        histories = sum(tally.histories for tally in self.tallies.values())
        print(f"seed {self.seed}: {histories} histories, {wrong} with differences")
        return wrong


def again(name: str) -> int:
    """One case, told in full. Returns how many differences it has."""
    area, seed, number = name.split("/")
    for case, world, history in cases(area, seed):
        account = safely(world, history)  # those before it belong to it: they share an oracle, and perhaps a bug
        if case.number == int(number):
            print(f"{case.name}, {world.name}\n{differing_fields(history)}")
            print("\n".join(account.differences) or "no difference")
            return len(account.differences)
    print(f"{name}: the model is refused")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, the areas together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", help=f"some areas of {','.join(AREAS)}", type=lambda text: text.split(","))
    parser.add_argument("--case", help="run one case again, as a difference names it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    if options.case:
        return 1 if again(options.case) else 0
    if unknown := sorted(set(options.only or ()) - set(AREAS)):
        parser.error(f"no area {', '.join(unknown)}; there are {', '.join(AREAS)}")
    print(f"attack with seed {options.seed}, {options.minutes:g} minutes", flush=True)
    areas = [area for area, each in AREAS.items() if each.share]
    if options.minutes < _MINUTES_TO_COMPILE:
        areas.remove("compiled")
    attack = Attack(options.seed, options.only or areas, 60 * options.minutes)
    attack.run()
    return 1 if attack.close() else 0


if __name__ == "__main__":
    sys.exit(main())
