"""What every engine keeps, whatever is behind it. A test module subclasses `EngineContract` and gives the fixtures.

    class TestEcho(EngineContract):
        @pytest.fixture
        async def engine(self): ...

Fixtures to give: `engine` (a booted Engine; may be shared by the module) and `run_spec` (a settled spec that the engine can train
with group_size 4). Tests open runs of their own in directories of their own, so that one engine can serve them all.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from swarm.engine.seam import (
    Engine,
    EngineError,
    EngineHealth,
    RequestRefused,
    RunContext,
    Sampled,
    SampledChoice,
    SampleRequest,
    TrainBatch,
    TrainCall,
    TrainEpisode,
    TrainGroup,
    TrainingRefused,
)
from swarm.protocol.episodes import VersionSpan, WeightsVersion
from swarm.protocol.runspec import RunSpec

OpenRun = Callable[..., Awaitable[RunContext]]


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 1.0, "max_tokens": 12, **fields}


def request(body: dict[str, Any], prompt_ids: list[int] | None = None) -> SampleRequest:
    return SampleRequest(dialect="chat.completions", body=body, prompt_ids=prompt_ids)


def text(prompt: str | list[int], prompt_ids: list[int] | None = None, **fields: Any) -> SampleRequest:
    body = {"prompt": prompt, "temperature": 1.0, "max_tokens": 12, **fields}
    return SampleRequest(dialect="completions", body=body, prompt_ids=prompt_ids)


def train_call(call_id: str, sampled: Sampled, temperature: float = 1.0) -> TrainCall:
    choice = sampled.choices[0]
    return TrainCall(
        call_id=call_id,
        agent=None,
        prompt_ids=sampled.prompt_ids,
        sampled_ids=choice.sampled_ids,
        logprobs=choice.logprobs,
        temperature=temperature,
        versions=choice.versions,
        truncated=choice.finish_reason == "length",
    )


async def sampled_group(engine: Engine, group_id: str, text: str, size: int = 4) -> TrainGroup:
    """A group of one-call episodes whose rewards alternate, so that there is something to learn from."""
    episodes = []
    for slot in range(size):
        sampled = await engine.sample(request(chat(text, seed=slot)))
        call = train_call(f"{group_id}-{slot}", sampled)
        episode_id = f"ep-{group_id}-{slot}"
        episodes.append(TrainEpisode(episode_id=episode_id, reward=float(slot % 2), agent_rewards=None, calls=[call]))
    return TrainGroup(group_id=group_id, task_id=text, episodes=episodes)


async def batch_of(engine: Engine, spec: RunSpec, step: int, groups: int = 2) -> TrainBatch:
    made = [await sampled_group(engine, f"{step}-{number}", f"What is {number}+{step}?") for number in range(groups)]
    return TrainBatch(step=step, spec=spec, groups=made)


def assert_sound(choice: SampledChoice) -> None:
    """Ids, logprobs and versions of a choice belong together."""
    assert choice.sampled_ids
    assert len(choice.logprobs) == len(choice.sampled_ids)
    assert all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in choice.logprobs)
    assert covered(choice.versions) == list(range(len(choice.sampled_ids)))


def covered(versions: list[VersionSpan]) -> list[int]:
    return [position for span in versions for position in range(span.start, span.end)]


class EngineContract:
    """The tests. None of them knows which engine it runs on."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def open_run(self, engine: Engine, run_spec: RunSpec, tmp_path: Path) -> OpenRun:
        async def opened(run_id: str = "run-contract", spec: RunSpec | None = None) -> RunContext:
            directory = tmp_path / run_id
            directory.mkdir(exist_ok=True)
            run = RunContext(run_id=run_id, branch=0, spec=spec or run_spec, directory=directory)
            await engine.open_run(run)
            return run

        return opened

    # -- what is hosted -------------------------------------------------------------------------------------------

    async def test_info_names_the_model_and_how_long_a_prompt_may_be(self, engine: Engine) -> None:
        info = engine.info
        assert info.backend
        assert info.device
        assert info.model
        assert len(info.fingerprint) == 64
        assert info.max_model_len > 0

    async def test_booting_again_does_nothing(self, engine: Engine) -> None:
        told: list[EngineHealth] = []
        before = engine.info
        engine.subscribe(told.append)
        await engine.boot()
        assert engine.info == before
        assert all(health.ready for health in told)

    # -- tokens ---------------------------------------------------------------------------------------------------

    async def test_render_makes_the_ids_that_sampling_uses(self, engine: Engine, open_run: OpenRun) -> None:
        await open_run()
        body = chat("Name a colour.")
        assert await engine.render("chat.completions", body) == (await engine.sample(request(body))).prompt_ids

    async def test_render_without_the_generation_prompt_is_a_prefix(self, engine: Engine) -> None:
        body = chat("Name a colour.")
        whole = await engine.render("chat.completions", body)
        bare = await engine.render("chat.completions", body, add_generation_prompt=False)
        assert whole[: len(bare)] == bare
        assert len(bare) < len(whole)

    async def test_tools_stand_in_the_prompt(self, engine: Engine) -> None:
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
        tool = {"type": "function", "function": {"name": "weather_of_city", "parameters": parameters}}
        ids = await engine.render("chat.completions", chat("Weather?", tools=[tool]))
        assert "weather_of_city" in engine.decode(ids)

    async def test_decode_gives_the_text_with_special_tokens(self, engine: Engine) -> None:
        body = chat("Grüße, ein Wort!")
        text = engine.decode(await engine.render("chat.completions", body))
        assert "Grüße, ein Wort!" in text
        assert text != "Grüße, ein Wort!"

    # -- sampling -------------------------------------------------------------------------------------------------

    async def test_every_sampled_token_has_its_logprob_and_its_weights_version(
        self, engine: Engine, open_run: OpenRun
    ) -> None:
        run = await open_run()
        sampled = await engine.sample(request(chat("Say red")))
        (choice,) = sampled.choices
        assert_sound(choice)
        assert {span.version for span in choice.versions} == {WeightsVersion(run_id=run.run_id, branch=0, step=0)}
        assert choice.finish_reason in {"stop", "length"}

    async def test_the_answer_is_in_the_dialect_and_shows_what_was_sampled(
        self, engine: Engine, open_run: OpenRun
    ) -> None:
        await open_run()
        sampled = await engine.sample(request(chat("Say red")))
        answer = sampled.answer
        assert answer["object"] == "chat.completion"
        message = answer["choices"][0]["message"]
        assert message["role"] == "assistant"
        assert message["content"].strip() in engine.decode(sampled.choices[0].sampled_ids)
        assert answer["choices"][0]["finish_reason"] == sampled.choices[0].finish_reason
        assert answer["usage"]["prompt_tokens"] == len(sampled.prompt_ids)
        assert answer["usage"]["completion_tokens"] == len(sampled.choices[0].sampled_ids)

    async def test_given_prompt_ids_are_sampled_from_whatever_the_messages_say(
        self, engine: Engine, open_run: OpenRun
    ) -> None:
        await open_run()
        ids = await engine.render("chat.completions", chat("Say green"))
        sampled = await engine.sample(request(chat("Say red"), prompt_ids=ids))
        assert sampled.prompt_ids == ids

    async def test_equal_seeds_give_equal_tokens(self, engine: Engine, open_run: OpenRun) -> None:
        await open_run()
        first = await engine.sample(request(chat("Say red", seed=7)))
        again = await engine.sample(request(chat("Say red", seed=7)))
        assert first.choices[0].sampled_ids == again.choices[0].sampled_ids

    async def test_n_choices_are_each_recorded(self, engine: Engine, open_run: OpenRun) -> None:
        await open_run()
        sampled = await engine.sample(request(chat("Say red", n=3)))
        assert [choice.index for choice in sampled.choices] == [0, 1, 2]
        for choice in sampled.choices:
            assert_sound(choice)
        assert len(sampled.answer["choices"]) == 3

    async def test_an_answer_cut_by_max_tokens_says_so(self, engine: Engine, open_run: OpenRun) -> None:
        await open_run()
        sampled = await engine.sample(request(chat("Repeat after me: abcdefghijkl", max_tokens=2)))
        assert len(sampled.choices[0].sampled_ids) == 2
        assert sampled.choices[0].finish_reason == "length"

    async def test_a_prompt_beyond_the_context_is_refused_in_the_dialects_format(
        self, engine: Engine, open_run: OpenRun
    ) -> None:
        await open_run()
        with pytest.raises(RequestRefused) as refused:
            await engine.sample(request(chat("word " * (engine.info.max_model_len + 8))))
        assert refused.value.status == 400
        assert refused.value.body["error"]["message"]

    async def test_an_answer_has_the_room_that_its_prompt_leaves_whatever_its_limit(
        self, engine: Engine, open_run: OpenRun
    ) -> None:
        await open_run()
        room = engine.info.max_model_len
        ids = await engine.render("chat.completions", chat("Repeat red"))
        filler = await engine.render("completions", {"prompt": "word " * (room // 8), "add_special_tokens": False})
        long = [*(filler * 16)[: room - 2 - len(ids)], *ids]
        asked = chat("Repeat red", max_tokens=12, ignore_eos=True)
        sampled = await engine.sample(request(asked, long))
        assert (len(sampled.choices[0].sampled_ids), sampled.choices[0].finish_reason) == (2, "length")
        with pytest.raises(RequestRefused) as refused:
            await engine.sample(request(asked, [*filler[:8], *long]))
        assert refused.value.status == 400

    async def test_an_image_is_refused_by_a_model_that_reads_text(self, engine: Engine, open_run: OpenRun) -> None:
        await open_run()
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
        asked = chat("What is this?") | {"messages": [{"role": "user", "content": [image]}]}
        with pytest.raises(RequestRefused) as refused:
            await engine.sample(request(asked))
        assert refused.value.status == 400
        assert refused.value.body["error"]["message"]

    # -- streaming ------------------------------------------------------------------------------------------------

    async def test_a_stream_books_the_same_tokens_as_a_whole_answer(self, engine: Engine, open_run: OpenRun) -> None:
        await open_run()
        whole = await engine.sample(request(chat("Say red", seed=11)))
        prompts: list[Any]
        ids: list[Any]
        prompts, ids, logprobs, versions, finish, text = [], [], [], [], None, ""
        async for event in engine.stream(request(chat("Say red", seed=11))):
            prompts += [event.prompt_ids] if event.prompt_ids is not None else []
            for choice in event.choices:
                versions += [
                    (len(ids) + at, span.version) for span in choice.versions for at in range(span.start, span.end)
                ]
                ids += choice.sampled_ids
                logprobs += choice.logprobs
                finish = choice.finish_reason or finish
            for shown in (event.data or {}).get("choices", []):
                text += shown["delta"].get("content") or ""
        assert prompts == [whole.prompt_ids]
        assert ids == whole.choices[0].sampled_ids
        assert logprobs == pytest.approx(whole.choices[0].logprobs, abs=0.02)
        assert finish == whole.choices[0].finish_reason
        assert text == whole.answer["choices"][0]["message"]["content"]
        assert [position for position, _ in versions] == list(range(len(ids)))

    async def test_a_stream_that_is_closed_stops(self, engine: Engine, open_run: OpenRun) -> None:
        await open_run()
        events = engine.stream(request(chat("Say a long word", max_tokens=64)))
        async for _ in events:
            break
        await events.aclose()  # type: ignore[attr-defined]
        assert_sound((await engine.sample(request(chat("Say red")))).choices[0])

    async def test_a_stream_reports_usage_when_asked(self, engine: Engine, open_run: OpenRun) -> None:
        await open_run()
        body = chat("Say red", stream=True, stream_options={"include_usage": True})
        data = [event.data or {} async for event in engine.stream(request(body))]
        told = [each["usage"] for each in data if each.get("usage")]
        assert told
        assert told[-1]["completion_tokens"] > 0

    # -- text completions -----------------------------------------------------------------------------------------

    async def test_a_text_is_sampled_from_its_own_ids(self, engine: Engine, open_run: OpenRun) -> None:
        await open_run()
        ids = await engine.render("completions", {"prompt": "One, two,", "add_special_tokens": False})
        assert engine.decode(ids) == "One, two,"
        by_text = await engine.sample(text("One, two,", seed=5, add_special_tokens=False))
        by_ids = await engine.sample(text(ids, seed=5))
        given = await engine.sample(text("Something else", seed=5, prompt_ids=ids))
        for sampled in (by_text, by_ids, given):
            (choice,) = sampled.choices
            assert_sound(choice)
            assert sampled.prompt_ids == ids
            assert choice.sampled_ids == by_text.choices[0].sampled_ids
            (told,) = sampled.answer["choices"]
            assert told["text"] in engine.decode(choice.sampled_ids)
            assert told["finish_reason"] == choice.finish_reason
            assert sampled.answer["usage"]["completion_tokens"] == len(choice.sampled_ids)

    async def test_a_text_tells_logprobs_when_asked_and_each_choice_is_booked(
        self, engine: Engine, open_run: OpenRun
    ) -> None:
        await open_run()
        plain = await engine.sample(text("One, two,", n=2))
        curious = await engine.sample(text("One, two,", n=2, logprobs=1))
        assert [choice["logprobs"] for choice in plain.answer["choices"]] == [None, None]
        for told, choice in zip(curious.answer["choices"], curious.choices, strict=True):
            assert_sound(choice)
            assert told["logprobs"]["token_logprobs"] == pytest.approx(choice.logprobs)

    async def test_a_streamed_text_books_the_same_tokens_as_a_whole_one(
        self, engine: Engine, open_run: OpenRun
    ) -> None:
        await open_run()
        whole = await engine.sample(text("One, two,", seed=11))
        prompts, ids, finish, said = [], [], None, ""
        async for event in engine.stream(text("One, two,", seed=11)):
            prompts += [event.prompt_ids] if event.prompt_ids is not None else []
            for choice in event.choices:
                assert covered(choice.versions) == list(range(len(choice.sampled_ids)))
                ids += choice.sampled_ids
                finish = choice.finish_reason or finish
            for shown in (event.data or {}).get("choices", []):
                assert not shown.get("logprobs")
                said += shown["text"]
        assert prompts == [whole.prompt_ids]
        assert ids == whole.choices[0].sampled_ids
        assert finish == whole.choices[0].finish_reason
        assert said == whole.answer["choices"][0]["text"]

    async def test_a_text_beyond_the_context_is_refused(self, engine: Engine, open_run: OpenRun) -> None:
        await open_run()
        with pytest.raises(RequestRefused) as refused:
            await engine.sample(text("word " * (engine.info.max_model_len + 8)))
        assert refused.value.status == 400

    # -- training -------------------------------------------------------------------------------------------------

    async def test_a_step_moves_the_weights_and_reports_finite_metrics(self, engine: Engine, open_run: OpenRun) -> None:
        run = await open_run()
        outcome = await engine.train(await batch_of(engine, run.spec, 1))
        assert outcome.step == 1
        assert all(math.isfinite(value) for value in outcome.metrics.values()), outcome.metrics
        for name in ("reward_mean", "loss", "grad_norm", "learning_rate", "tokens_called", "tokens_merged", "train_s"):
            assert name in outcome.metrics
        assert outcome.metrics["reward_mean"] == pytest.approx(0.5)
        assert outcome.metrics["weights_change"] > 0
        assert outcome.metrics["tokens_merged"] < outcome.metrics["tokens_called"]
        assert outcome.untrained == {}

    async def test_new_weights_are_served_only_after_serve(self, engine: Engine, open_run: OpenRun) -> None:
        run = await open_run()
        await engine.train(await batch_of(engine, run.spec, 1))
        before = await engine.sample(request(chat("Say red")))
        assert before.choices[0].versions[0].version.step == 0
        await engine.serve(WeightsVersion(run_id=run.run_id, branch=0, step=1))
        after = await engine.sample(request(chat("Say red")))
        assert after.choices[0].versions[0].version == WeightsVersion(run_id=run.run_id, branch=0, step=1)

    async def test_equal_rewards_leave_their_group_untrained_and_say_so(
        self, engine: Engine, open_run: OpenRun
    ) -> None:
        run = await open_run()
        mixed = await sampled_group(engine, "mixed", "Say red")
        flat = await sampled_group(engine, "flat", "Say blue")
        levelled = [
            TrainEpisode(episode_id=episode.episode_id, reward=1.0, agent_rewards=None, calls=episode.calls)
            for episode in flat.episodes
        ]
        groups = [mixed, TrainGroup(group_id="flat", task_id="flat", episodes=levelled)]
        outcome = await engine.train(TrainBatch(step=1, spec=run.spec, groups=groups))
        assert outcome.untrained == {episode.episode_id: "zero_variance" for episode in levelled}
        assert outcome.metrics["zero_variance_share"] == pytest.approx(0.5)

    async def test_tokens_without_provenance_are_refused(self, engine: Engine, open_run: OpenRun) -> None:
        run = await open_run()
        group = await sampled_group(engine, "bad", "Say red")
        group.episodes[0].calls[0].logprobs.pop()
        with pytest.raises(TrainingRefused):
            await engine.train(TrainBatch(step=1, spec=run.spec, groups=[group]))

    async def test_a_step_out_of_order_is_refused(self, engine: Engine, open_run: OpenRun) -> None:
        run = await open_run()
        batch = await batch_of(engine, run.spec, 1, groups=1)
        with pytest.raises(TrainingRefused):
            await engine.train(TrainBatch(step=3, spec=run.spec, groups=batch.groups))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    async def test_a_run_is_restored_from_its_newest_checkpoint_and_replays_alike(
        self, engine: Engine, open_run: OpenRun
    ) -> None:
        run = await open_run()
        first = await batch_of(engine, run.spec, 1)
        await engine.train(first)
        await engine.serve(WeightsVersion(run_id=run.run_id, branch=0, step=1))
        assert await engine.checkpoint() == 1
        await engine.require_checkpoint(run.directory, 1)
        second = await batch_of(engine, run.spec, 2)
        once = await engine.train(second)
        assert await engine.open_run(run) == 1
        replayed = await engine.train(second)
        for name in ("loss", "grad_norm", "weights_change"):
            assert replayed.metrics[name] == pytest.approx(once.metrics[name], rel=1e-3, abs=1e-6)

    async def test_a_run_can_be_opened_at_its_start_again(self, engine: Engine, open_run: OpenRun) -> None:
        run = await open_run()
        await engine.train(await batch_of(engine, run.spec, 1))
        await engine.checkpoint()
        assert await engine.open_run(run, at_step=0) == 0
        assert (await engine.sample(request(chat("Say red")))).choices[0].versions[0].version.step == 0

    async def test_a_checkpoint_that_is_not_there_is_an_error(self, engine: Engine, open_run: OpenRun) -> None:
        run = await open_run()
        with pytest.raises(EngineError):
            await engine.open_run(run, at_step=7)
        with pytest.raises(EngineError):
            await engine.require_checkpoint(run.directory, 7)
        await engine.open_run(run)

    async def test_another_run_starts_from_the_hosted_model(self, engine: Engine, open_run: OpenRun) -> None:
        body = chat("Say red", seed=5, temperature=0.0)
        await open_run("run-one")
        untouched = (await engine.sample(request(body))).choices[0].sampled_ids
        run = await open_run("run-two")
        await engine.train(await batch_of(engine, run.spec, 1))
        await engine.serve(WeightsVersion(run_id=run.run_id, branch=0, step=1))
        await open_run("run-three")
        assert (await engine.sample(request(body))).choices[0].sampled_ids == untouched
