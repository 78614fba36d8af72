"""Lets a person take part in a run: judge the model's answers, play the agent, or talk to the model.

Training never treats what a person typed as if the model had sampled it (docs/guides/people.md).
"""

from swarm.client.join.person import Person, PersonLeft
from swarm.client.join.session import Session, TooLate

__all__ = ["Person", "PersonLeft", "Session", "TooLate"]
