"""The *turns* task of the benches, the same for both sides: a clerk with two functions, eight turns. Needs only the standard library."""

from __future__ import annotations

import json
import random
import re

TURNS = 8
EPISODES = 4
MAX_TOKENS = 20
"""Maximum tokens of one turn."""
TOWNS = ("Arle", "Bexhill", "Corve", "Dunmore", "Elsby", "Farrow", "Gorse", "Hythe")
_GOODS = ("apples", "barrels of oil", "bolts of cloth", "sacks of corn", "crates of glass", "tins of paint")
_NUMBER = re.compile(r"-?\d+")
_TOWN = {"type": "string", "enum": list(TOWNS)}
_FUNCTIONS = (
    {
        "name": "look",
        "description": "How many crates a town holds at this moment.",
        "parameters": {"type": "object", "properties": {"town": _TOWN}, "required": ["town"]},
    },
    {
        "name": "move",
        "description": "Bring crates from one town to another by cart.",
        "parameters": {
            "type": "object",
            "properties": {"source": _TOWN, "target": _TOWN, "crates": {"type": "integer", "maximum": 20}},
            "required": ["source", "target", "crates"],
        },
    },
)
_RULES = (
    "You are the clerk of a trading company. You work by calling one function per turn, as JSON on one line, and "
    "nothing else. look(town) tells how many crates a town holds. move(source, target, crates) brings crates from one "
    'town to another. For example {"name": "look", "town": "Arle"} or {"name": "move", "source": "Arle", "target": '
    '"Hythe", "crates": 3}. Rules of the company: never move more crates than a town holds; a move of no crates is a '
    "mistake; look at a town before you move anything out of it; say the name of a town exactly as it is written in the "
    "list; do not explain what you do; a turn without a call is lost, and after eight turns the day is over. "
    "Roads: Arle is next to Bexhill and Corve, Bexhill is next to Dunmore, Corve is next to Elsby and Farrow, Dunmore is "
    "next to Gorse, Elsby is next to Hythe, Farrow is next to Gorse, Gorse is next to Hythe. A cart carries at most "
    "twenty crates. The company pays one coin for every crate that arrives where it is wanted, takes one coin for every "
    "road that a cart has to travel, and takes two coins for every call that cannot be read. "
)


class Clerk:
    """One episode: the first message to the model, the reply to each of its turns, and the reward."""

    def __init__(self, task: int) -> None:
        draw = random.Random(f"clerk/{task}")
        self._stock = {town: draw.randint(2, 99) for town in TOWNS}
        self._goal = draw.choice(TOWNS)
        self._turn = 1
        self.coins = 0.0
        manual = _RULES + ledger(task) + "".join("\n" + json.dumps(function) for function in _FUNCTIONS)
        order = f"Bring as many crates as you can to {self._goal}. Begin with your first call."
        self.opening = [{"role": "system", "content": manual}, {"role": "user", "content": order}]

    def obey(self, call: str) -> str:
        """Carry out the model's call; returns the user's next message."""
        told, coins = self._obeyed(call)
        self._turn += 1
        self.coins += coins
        return f"{told} Turn {self._turn}."

    def _obeyed(self, call: str) -> tuple[str, float]:
        """Result of a call: the reply, and the coins earned. An unreadable call gets a reply that says so."""
        stock = self._stock
        named = [town for town in re.findall(r"[A-Z][a-z]+", call) if town in stock]
        numbers = [int(found) for found in _NUMBER.findall(call)]
        if "move" in call and len(named) > 1 and numbers:
            crates = min(abs(numbers[-1]), stock[named[0]], 20)
            stock[named[0]] -= crates
            stock[named[1]] += crates
            return f"{crates} moved.", float(crates if named[1] == self._goal else -1)
        if named:
            return f"{named[0]}: {stock[named[0]]}.", -0.1 * call.index(named[0])
        return "No call.", -2.0 - 0.01 * len(call)


def ledger(task: int) -> str:
    """Stock of every town: a text of about 250 tokens, different for each task."""
    draw = random.Random(f"ledger/{task}")
    lines = [
        f"{town} holds {draw.randint(2, 99)} {draw.choice(_GOODS)} and {draw.randint(2, 99)} {draw.choice(_GOODS)}, "
        f"brought on {draw.choice(('foot', 'a cart', 'a barge'))} from {draw.choice(TOWNS)}."
        for town in TOWNS
    ]
    return " ".join(lines)


def goods(task: int) -> str:
    return _GOODS[task % len(_GOODS)]
