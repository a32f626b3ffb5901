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


def attack(seed: int, areas: list[str], seconds: float) -> int:
    """Go through the areas, world by world, until the time is up. Returns how many histories went wrong."""
    tallies = {area: Tally() for area in areas}
    start = shown = time.monotonic()
    while time.monotonic() - start < seconds:
        area = min(areas, key=lambda area: tallies[area].seconds / AREAS[area].share)
        begun = time.monotonic()
        _attack_world(area, f"{seed}.{tallies[area].worlds}", tallies[area])
        tallies[area].seconds += time.monotonic() - begun
        histories, wrong = (sum(getattr(t, name) for t in tallies.values()) for name in ("histories", "wrong"))
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(
                f"  {min((shown - start) / seconds, 1):4.0%} {histories} histories, {wrong} wrong; {area}", flush=True
            )
    print("", *(tally.line(area) for area, tally in tallies.items()), sep="\n")
    print(f"seed {seed}: {histories} histories, {wrong} with differences")
    return wrong


def _attack_world(area: str, seed: str, tally: Tally) -> None:
    before = tally.histories
    for name, world, history in cases(area, seed):
        account = safely(world, history)
        tally.histories += 1
        tally.account.add(account)
        if account.differences:
            tally.wrong += 1
            print(f"  {name}, {world.name}: {account.differences[0]}\n    {differing_fields(history)}")
            print(f"    again: python -m tests.attack --case {name}", flush=True)
    tally.worlds += 1
    tally.refused += tally.histories == before


def again(case: str) -> int:
    """Run a case, and print all of it. Returns how many differences it has."""
    area, seed, _ = case.split("/")
    for name, world, history in cases(area, seed):
        account = safely(world, history)  # those before it belong to it: they share an oracle, and perhaps a bug
        if name == case:
            print(f"{name}, {world.name}\n{differing_fields(history)}")
            print("\n".join(account.differences) or "no difference")
            return len(account.differences)
    print(f"{case}: the model is refused")
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
        return int(again(options.case) > 0)
    if unknown := sorted(set(options.only or ()) - set(AREAS)):
        parser.error(f"no area {', '.join(unknown)}; there are {', '.join(AREAS)}")
    print(f"attack with seed {options.seed}, {options.minutes:g} minutes", flush=True)
    areas = [area for area in AREAS if "compiled" not in area or options.minutes >= _MINUTES_TO_COMPILE]
    return int(attack(options.seed, options.only or areas, 60 * options.minutes) > 0)


if __name__ == "__main__":
    sys.exit(main())
