"""People in the swarm: one person at one run who judges the model's answers, plays the agent, or talks to the model.

What a person types is never trained on as if the model had sampled it (docs/guides/people.md).
"""

from swarm.client.join.person import Person, PersonLeft
from swarm.client.join.session import Session, TooLate

__all__ = ["Person", "PersonLeft", "Session", "TooLate"]
