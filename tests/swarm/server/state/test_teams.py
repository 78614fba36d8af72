"""Teams on both or on none: two state machines over real storage, with a crash possible at every write and every message at risk.

A model-based test. Honest clients take their teams through claim, prepare, commit and tell, or give up, or die anywhere. A request
may be lost, or its answer, or be delivered twice, or once more much later; a server may die before or after any write, its disk may
be full, its run may end. Afterwards every team counts on both servers or on none, and on both when its client was told so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from foundation.clock import ManualClock
from foundation.ids import SeededIds
from foundation.paths import memory_dir
from swarm.protocol.episodes import DropReason, EpisodeClaim, EpisodeGrant, EpisodeResult, EpisodeState, RecordedCall
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.runspec import BatchSpec, RunSpec
from swarm.protocol.summary import LedgerFilter
from swarm.protocol.teams import (
    Decider,
    EpisodePreparation,
    EpisodeResolution,
    TeamDecision,
    TeamReceipt,
    TeamResult,
)
from swarm.server.state import claims, episodes, health, run_lifecycle, teams
from swarm.server.state.calls import Ending
from swarm.server.state.claim_queue import NotYet
from swarm.server.state.episodes import late_abort, late_end
from swarm.server.state.machine import Command, expire
from swarm.server.state.rows import TeamRow
from swarm.server.state.teams import late_commit, late_decision, late_prepare, late_resolve
from tests.swarm.server.state.process import Died, Process
from tests.swarm.server.state.test_exactly_once import recorded, refused_with

T = TypeVar("T")
SPEC = RunSpec(batch=BatchSpec(tasks=4, group_size=4, group_patience_s=1e6), max_staleness=2)
IDLE_S, PATIENCE_S = 100.0, 60.0


class NoAnswer(Exception):
    """The request was lost, or its answer, or the server died on it."""


class Server(Process):
    """One server, with the service's way of asking it."""

    def __init__(self, folder: Path, clock: ManualClock, seed: int) -> None:
        super().__init__(folder / f"{seed}.sqlite", clock, SeededIds(seed))
        self.begin_run()

    def start(self) -> None:
        super().start()
        run = self.state.run
        if run is not None and not run.row.released:
            self.tell(lambda t: health.engine_opened(t, run.run_id))

    def begin_run(self) -> None:
        run = self.tell(lambda t: run_lifecycle.create(t, SPEC, by="me", key=None, request_digest=""))
        self.tell(lambda t: health.engine_opened(t, run.run_id))

    def write(self, fate: str, command: Command[T]) -> T:
        try:
            return self.carry_out(fate, command)
        except Died as error:
            raise NoAnswer from error
        except Refusal as refusal:
            if refusal.code is ErrorCode.STORAGE_FULL:
                raise NoAnswer from refusal
            raise

    def knows(self, episode_id: str) -> bool:
        return self.is_open(episode_id) or self.is_prepared(episode_id)

    def is_prepared(self, episode_id: str) -> bool:
        return episode_id in self.state.prepared

    def rows(self, episode_id: str) -> tuple[object, TeamRow | None]:
        row = self.store.read.episode(episode_id)
        return row, self.store.read.team(row.seq) if row is not None else None

    def outcome(self, episode_id: str) -> str | None:
        """committed, aborted (or dropped before it was prepared), or None while it may be either."""
        row, team = self.rows(episode_id)
        if team is not None:
            return team.outcome
        return None if row.state is EpisodeState.RUNNING else "aborted"  # type: ignore[attr-defined]

    # -- requests -------------------------------------------------------------------------------------------------------

    def claim(self, fate: str, task: str) -> EpisodeGrant | None:
        run = self.state.run
        assert run is not None
        claim = EpisodeClaim(run_id=run.run_id, client_id="c", task_id=task, idle_limit_s=IDLE_S)
        granted = self.write(fate, lambda t: claims.claim(t, claim))
        return None if isinstance(granted, NotYet) else granted

    def call(self, held: EpisodeGrant) -> None:
        opened = self.tell(lambda t: episodes.open_call(t, held.episode_id, held.lease, Ending()))
        record: RecordedCall = recorded(held.episode_id, opened.index, opened.weights_version)
        self.tell(lambda t: episodes.close_call(t, opened, [record]))

    def prepare(self, fate: str, held: EpisodeGrant, wish: EpisodePreparation) -> TeamReceipt:
        if not self.knows(held.episode_id):
            return late_prepare(*self.rows(held.episode_id), held.episode_id, wish)  # type: ignore[arg-type]
        return self.write(fate, lambda t: teams.prepare(t, held.episode_id, wish, "sealed"))

    def commit(self, fate: str, held: EpisodeGrant) -> TeamReceipt:
        if not self.knows(held.episode_id):
            return late_commit(*self.rows(held.episode_id), held.episode_id, held.lease)  # type: ignore[arg-type]
        return self.write(fate, lambda t: teams.commit(t, held.episode_id, held.lease))

    def abort(self, fate: str, held: EpisodeGrant) -> None:
        if self.is_prepared(held.episode_id):
            self.write(fate, lambda t: teams.abort(t, held.episode_id, held.lease, "gave up"))
        elif self.is_open(held.episode_id):
            self.write(fate, lambda t: episodes.abort(t, held.episode_id, held.lease, "gave up"))
        else:
            late_abort(self.rows(held.episode_id)[0], held.episode_id, held.lease)  # type: ignore[arg-type]

    def decision(self, episode_id: str) -> TeamDecision:
        if self.knows(episode_id):
            return TeamDecision(episode_id=episode_id, decision="undecided")
        return late_decision(self.rows(episode_id)[1], episode_id)


Request = Callable[[str], object]
"""Takes the fate of the server's write."""

WRITES = st.sampled_from(["written"] * 8 + ["full", "dies before", "dies after"])
EVENTS = st.sampled_from(["nothing"] * 4 + ["kill", "kill", "time", "ask", "replace run"])
NETS = st.sampled_from(["delivered"] * 8 + ["request lost", "answer lost", "twice"])


@dataclass
class Client:
    """One team as its client holds it. Honest: after a commit that may have been heard it never aborts."""

    decider: int
    task: str
    held: dict[int, EpisodeGrant] = field(default_factory=dict)
    called: bool = False
    prepared: set[int] = field(default_factory=set)
    asked_to_commit: bool = False
    told_committed: bool = False
    """The decider said so."""
    told_others: bool = False
    gone: bool = False

    @property
    def order(self) -> list[int]:
        return [1 - self.decider, self.decider]


class Teams(RuleBasedStateMachine):
    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=memory_dir())
        self.clock = ManualClock()
        self.servers = [Server(Path(self.folder.name), self.clock, seed) for seed in (1, 2)]
        self.all: list[Client] = []
        self.sent: list[tuple[int, Request]] = []
        """Requests that the network may deliver once more."""

    # -- the network ------------------------------------------------------------------------------------------------------

    def send(self, to: int, request: Request, net: str, fate: str) -> object:
        self.sent.append((to, request))
        if net == "request lost":
            raise NoAnswer
        answer = request(fate)
        if net == "twice":
            answer = request("written")
        if net == "answer lost":
            raise NoAnswer
        return answer

    @rule(which=st.integers(0, 10_000), fate=WRITES)
    def deliver_once_more(self, which: int, fate: str) -> None:
        if self.sent:
            try:
                self.sent[which % len(self.sent)][1](fate)
            except (Refusal, NoAnswer):
                return

    # -- clients --------------------------------------------------------------------------------------------------------

    @rule(target=clients, decider=st.integers(0, 1), task=st.sampled_from("ab"))
    def begin(self, decider: int, task: str) -> Client:
        client = Client(decider=decider, task=task)
        self.all.append(client)
        return client

    @rule(
        client=clients,
        nets=st.lists(NETS, min_size=6, max_size=6),
        fates=st.lists(WRITES, min_size=6, max_size=6),
        steps=st.integers(1, 6),
    )
    def go_on(self, client: Client, nets: list[str], fates: list[str], steps: int) -> None:
        for net, fate in list(zip(nets, fates, strict=True))[:steps]:
            if client.gone:
                return
            try:
                self.one_step(client, net, fate)
            except NoAnswer:
                continue  # it asks the same again
            except Refusal as refusal:
                refused_with(refusal, ErrorCode.LEASE_LOST, ErrorCode.OVER_LIMIT, ErrorCode.NOT_FOUND)
                assert not client.told_committed
                client.asked_to_commit = False  # the decider's word: it is aborted
                self.give_up(client, net, fate)

    @rule(
        decider=st.integers(0, 1),
        nets=st.lists(NETS, min_size=10, max_size=10),
        fates=st.lists(WRITES, min_size=10, max_size=10),
        events=st.lists(st.tuples(EVENTS, st.integers(0, 1)), min_size=10, max_size=10),
    )
    def go_through_with_it(
        self, decider: int, nets: list[str], fates: list[str], events: list[tuple[str, int]]
    ) -> None:
        """A whole team, and something that happens after each of its steps."""
        client = Client(decider=decider, task="a")
        self.all.append(client)
        for net, fate, (event, side) in zip(nets, fates, events, strict=True):
            self.go_on(client, [net], [fate], 1)
            if event == "kill":
                self.servers[side].die()
            elif event == "replace run":
                self.replace_run(side, 9, "written")
            elif event == "time":
                self.time_passes(61.0, ("written", "written"))
            if event != "nothing":
                self.ask_deciders("delivered", "written")

    def one_step(self, client: Client, net: str, fate: str) -> None:
        missing = [side for side in client.order if side not in client.held]
        if missing:
            granted = self.servers[missing[0]].claim(fate, client.task)
            if granted is not None:
                client.held[missing[0]] = granted
        elif not client.called:
            for side, held in client.held.items():
                self.servers[side].call(held)
            client.called = True
        elif len(client.prepared) < 2:
            side = next(side for side in client.order if side not in client.prepared)
            self.send(side, self.preparation(client, side), net, fate)
            client.prepared.add(side)
        elif not client.told_committed:
            client.asked_to_commit = True
            held, server = client.held[client.decider], self.servers[client.decider]
            self.send(client.decider, lambda fate: server.commit(fate, held), net, fate)
            client.told_committed = True
        elif not client.told_others:
            held, server = client.held[1 - client.decider], self.servers[1 - client.decider]
            self.send(1 - client.decider, lambda fate: server.commit(fate, held), net, fate)
            client.told_others = True

    def preparation(self, client: Client, side: int) -> Request:
        held, server = client.held[side], self.servers[side]
        wish = EpisodePreparation(
            lease=held.lease,
            decider=Decider(
                url=f"http://server-{client.decider}", episode_id=client.held[client.decider].episode_id, key="swd_k"
            ),
            result=TeamResult(reward=float(side)),
            patience_s=PATIENCE_S,
        )
        return lambda fate: server.prepare(fate, held, wish)

    @rule(client=clients, net=NETS, fate=WRITES)
    def give_up(self, client: Client, net: str, fate: str) -> None:
        """An exception in the agent, or a member that was lost: abort on all, the decider first; nobody waits for answers."""
        if client.gone or client.asked_to_commit:
            return
        client.gone = True
        for side in reversed(client.order):
            held = client.held.get(side)
            if held is not None:
                server = self.servers[side]
                try:
                    self.send(side, lambda fate, server=server, held=held: server.abort(fate, held), net, fate)  # type: ignore[misc]
                except (NoAnswer, Refusal):
                    continue

    @rule(client=clients)
    def die(self, client: Client) -> None:
        client.gone = True

    @rule(client=clients, side=st.integers(0, 1))
    def end_a_member_by_itself(self, client: Client, side: int) -> None:
        """A plain end of what is prepared or decided changes nothing."""
        held = client.held.get(side)
        server = self.servers[side]
        if held is None or server.is_open(held.episode_id):
            return
        before = server.rows(held.episode_id)
        row = server.store.read.episode(held.episode_id)
        with pytest.raises(Refusal) as caught:
            late_end(row, held.episode_id, EpisodeResult(lease=held.lease, reward=17.0))
        assert caught.value.code is ErrorCode.LEASE_LOST
        assert server.rows(held.episode_id) == before

    # -- servers --------------------------------------------------------------------------------------------------------

    @rule(side=st.integers(0, 1), really=st.integers(0, 2))
    def kill(self, side: int, really: int) -> None:
        if really == 2:
            self.servers[side].die()

    @rule(side=st.integers(0, 1), really=st.integers(0, 9), fate=WRITES)
    def replace_run(self, side: int, really: int, fate: str) -> None:
        server = self.servers[side]
        if really == 9:
            try:
                server.write(fate, run_lifecycle.stop)
            except NoAnswer:
                return
            server.begin_run()

    @rule(seconds=st.sampled_from([1.0, 61.0, 101.0]), fates=st.tuples(WRITES, WRITES))
    def time_passes(self, seconds: float, fates: tuple[str, str]) -> None:
        self.clock.advance(seconds)
        for server, fate in zip(self.servers, fates, strict=True):
            try:
                server.write(fate, expire)
            except NoAnswer:
                continue

    @rule(net=NETS, fate=WRITES)
    def ask_deciders(self, net: str, fate: str) -> None:
        for side, server in enumerate(self.servers):
            for episode_id in teams.in_doubt(server.state):
                if episode_id in server.state.prepared:
                    self.ask(side, episode_id, net, fate)

    def ask(self, side: int, episode_id: str, net: str, fate: str) -> None:
        server = self.servers[side]
        prepared = server.state.prepared.get(episode_id)
        if prepared is None or net in ("request lost", "answer lost"):
            return
        decision = self.servers[1 - side].decision(prepared.team.decider_id)
        request: Request = lambda fate: server.write(fate, lambda t: teams.hear_decision(t, episode_id, decision))  # noqa: E731
        if decision.decision != "undecided":
            self.sent.append((side, request))
        try:
            request(fate)
        except NoAnswer:
            return

    # -- what must hold -----------------------------------------------------------------------------------------------------

    def outcomes(self, client: Client) -> tuple[str | None, str | None]:
        first, second = (
            self.servers[side].outcome(client.held[side].episode_id) if side in client.held else "aborted"
            for side in (0, 1)
        )
        return first, second

    @invariant()
    def never_on_one_alone(self) -> None:
        for client in self.all:
            assert set(self.outcomes(client)) != {"committed", "aborted"}
            if client.told_committed:
                assert self.outcomes(client)[client.decider] == "committed"

    @invariant()
    def what_is_prepared_holds_its_slot_and_is_in_no_pool(self) -> None:
        for server in self.servers:
            state = server.state
            for row in server.store.read.ledger(LedgerFilter(state=EpisodeState.PREPARED), 0, 10_000):
                assert row.episode_id in state.prepared
                assert row.episode_id not in state.pooled
                assert row.reward is None
                group = state.groups.get(row.group_id or "")
                if group is not None:
                    assert row.slot is not None
                    assert group.running[row.slot] == row.episode_id
            assert set(state.prepared) == {
                row.episode_id for row in server.store.read.ledger(LedgerFilter(state=EpisodeState.PREPARED), 0, 10_000)
            }

    def teardown(self) -> None:
        """The storm is over: without any client, the servers settle what is left."""
        for _ in range(3):
            self.time_passes(101.0, ("written", "written"))
            self.ask_deciders("delivered", "written")
        for client in self.all:
            first, second = self.outcomes(client)
            assert first == second
            assert first is not None
            assert first == "committed" or not client.told_committed
            if first == "committed":
                self.counts_with_its_own_reward(client)
        for server in self.servers:
            assert not server.state.prepared
            assert not server.state.live
            server.store.close()
        self.folder.cleanup()

    def counts_with_its_own_reward(self, client: Client) -> None:
        for side, held in client.held.items():
            row = self.servers[side].store.read.episode(held.episode_id)
            assert row is not None
            assert row.reward == float(side)
            assert row.state is EpisodeState.ENDED or row.reason is DropReason.RUN_ENDED


TestTeams = Teams.TestCase
TestTeams.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# -- single rules -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path, ManualClock(), 1)


def prepared_pair(server: Server) -> tuple[EpisodeGrant, EpisodeGrant]:
    """A decider and a participant that waits for a decider elsewhere, both prepared."""
    held = []
    for decider_id in (None, "ep-elsewhere"):
        granted = server.claim("written", "t")
        assert granted is not None
        server.call(granted)
        server.prepare("written", granted, wish(granted, decider_id or granted.episode_id))
        held.append(granted)
    return held[0], held[1]


def wish(held: EpisodeGrant, decider_id: str, reward: float = 1.0) -> EpisodePreparation:
    decider = Decider(url="http://elsewhere:8642", episode_id=decider_id, key="swd_k")
    return EpisodePreparation(
        lease=held.lease, decider=decider, result=TeamResult(reward=reward), patience_s=PATIENCE_S
    )


def test_a_silent_client_aborts_at_the_decider_and_puts_the_others_in_doubt(server: Server) -> None:
    decider, participant = prepared_pair(server)
    server.clock.advance(PATIENCE_S - 1)
    server.write("written", expire)
    server.tell(lambda t: teams.renew(t, decider.episode_id, decider.lease))
    server.tell(lambda t: teams.renew(t, participant.episode_id, participant.lease))
    server.clock.advance(PATIENCE_S - 1)
    server.write("written", expire)
    assert not teams.in_doubt(server.state)
    assert server.outcome(decider.episode_id) is None
    server.clock.advance(2)
    server.write("written", expire)
    row = server.store.read.episode(decider.episode_id)
    assert row is not None
    assert (row.reason, row.detail) == (
        DropReason.TEAM_ABORTED,
        "its client was silent for 60 s and had not committed",
    )
    assert teams.in_doubt(server.state) == [participant.episode_id]
    server.clock.advance(1e6)
    server.write("written", expire)
    assert server.outcome(participant.episode_id) is None, "a participant never decides by itself"


def test_a_participant_asks_as_soon_as_its_server_is_back(server: Server) -> None:
    _, participant = prepared_pair(server)
    server.die()
    assert teams.in_doubt(server.state) == [participant.episode_id]


def test_the_end_of_a_run_decides_here_and_waits_for_what_is_decided_elsewhere(server: Server) -> None:
    decider, participant = prepared_pair(server)
    server.write("written", run_lifecycle.stop)
    assert server.outcome(decider.episode_id) == "aborted"
    assert server.outcome(participant.episode_id) is None
    server.write("written", lambda t: teams.commit(t, participant.episode_id, participant.lease))
    row = server.store.read.episode(participant.episode_id)
    assert row is not None
    assert (row.reward, row.reason) == (1.0, DropReason.RUN_ENDED)


def test_a_prepared_episode_keeps_its_group_from_running_out_of_patience(server: Server) -> None:
    decider, _ = prepared_pair(server)
    group = next(iter(server.state.groups))
    assert sorted(group.running) == [0, 1]
    assert group.patience_ends_at() is None
    server.commit("written", decider)
    assert sorted(group.ended) == [0]


def test_claims_are_refused_while_nobody_decides_what_fills_the_pool(server: Server) -> None:
    groups = SPEC.batch.tasks * (SPEC.max_staleness + 1)
    held: list[EpisodeGrant] = []
    while (granted := server.claim("written", f"t-{len(held) // SPEC.batch.group_size}")) is not None:
        server.call(granted)
        server.prepare("written", granted, wish(granted, "ep-elsewhere"))
        held.append(granted)
    assert len(held) == groups * SPEC.batch.group_size
    for prepared in held[: SPEC.batch.group_size]:
        server.commit("written", prepared)
    assert server.claim("written", "t-new") is None, "what was committed still waits for its step"
    for prepared in held[-SPEC.batch.group_size :]:
        server.abort("written", prepared)
    assert server.claim("written", "t-new") is None, "the group of what was aborted keeps its place"
    assert server.claim("written", f"t-{groups - 1}") is not None


def test_repetitions_are_recognised_and_contradictions_refused(server: Server) -> None:
    decider, _ = prepared_pair(server)
    same, other = wish(decider, decider.episode_id), wish(decider, decider.episode_id, reward=0.5)
    assert server.prepare("written", decider, same).status == "prepared"
    with pytest.raises(Refusal) as caught:
        server.prepare("written", decider, other)
    assert caught.value.code is ErrorCode.IDEMPOTENCY_CONFLICT
    assert server.commit("written", decider).status == server.commit("written", decider).status == "committed"
    assert server.prepare("written", decider, same).status == "committed"
    with pytest.raises(Refusal) as caught:
        server.abort("written", decider)
    assert caught.value.code is ErrorCode.LEASE_LOST
    assert server.decision(decider.episode_id).decision == "committed"


def test_a_forged_lease_commits_and_aborts_nothing(server: Server) -> None:
    decider, _ = prepared_pair(server)
    for action in (
        lambda t: teams.commit(t, decider.episode_id, "swl_forged"),
        lambda t: teams.abort(t, decider.episode_id, "swl_forged", "no"),
        lambda t: teams.renew(t, decider.episode_id, "swl_forged"),
    ):
        with pytest.raises(Refusal) as caught:
            server.write("written", action)
        assert caught.value.code is ErrorCode.LEASE_LOST
    assert server.outcome(decider.episode_id) is None


def test_only_what_is_prepared_can_be_committed(server: Server) -> None:
    granted = server.claim("written", "t")
    assert granted is not None
    with pytest.raises(Refusal) as caught:
        server.commit("written", granted)
    assert caught.value.code is ErrorCode.INVALID_SPEC
    assert server.is_open(granted.episode_id)
    assert server.decision(granted.episode_id).decision == "undecided"
    server.abort("written", granted)
    assert server.decision(granted.episode_id).decision == "aborted"


@pytest.mark.parametrize("outcome", ["committed", "aborted"])
def test_an_operator_can_decide_in_place_of_a_decider_that_is_gone(server: Server, outcome: str) -> None:
    _, participant = prepared_pair(server)
    word = EpisodeResolution.model_validate({"outcome": outcome, "reason": "its disk burnt"})
    receipt = server.write("written", lambda t: teams.resolve(t, participant.episode_id, word))
    assert receipt.status == outcome
    row, team = server.rows(participant.episode_id)
    assert row.detail == "resolved by an operator: its disk burnt"  # type: ignore[attr-defined]
    assert late_resolve(row, team, participant.episode_id, word).status == outcome  # type: ignore[arg-type]
    assert participant.episode_id not in server.state.prepared
