"""Inference on this machine: vLLM's own server as a supervised child on a Unix socket that only we can reach.

It takes token ids, and returns token ids and log-probabilities with the version of the weights that sampled each token. Imports
neither torch nor vllm, and knows nothing of training.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from foundation.clock import Clock
from foundation.paths import write_atomically
from swarm.engine.machine import Device
from swarm.engine.memory.model import GIB
from swarm.engine.sampling.client import NotShared, VllmClient, loading_s
from swarm.engine.sampling.mask_files import mask_folder
from swarm.engine.sampling.sampler import Sampler
from swarm.engine.sampling.server import OUT_OF_MEMORY, ServedAdapter, VllmSettings
from swarm.engine.seam import (
    EngineDown,
    EngineError,
    EngineHealth,
    EngineHung,
    TrainerCrashed,
)
from swarm.engine.training.limits import ModelWork, Silence
from swarm.engine.training.supervisor import BackOff, ChildProcess, Supervisor
from swarm.protocol.episodes import WeightsVersion

_LOG = logging.getLogger(__name__)
_IMPORTS_S: dict[Device, float] = {"cpu": 120.0, "cuda": 600.0}
"""Time limit for a start, in seconds, not counting the time to read weights; an idle machine needs a sixth of it. On a GPU, vLLM also
compiles the model and captures its graphs."""
_PROBE_EVERY_S = 0.2
_LOOK_EVERY_S = 5.0
"""Seconds between checks of a serving child."""
_OVERRUN = 2
"""A check that takes this many times its interval shows that this process was suspended."""
_CHANGES = 4
"""Number of requests per change of weights, besides the request that loads them."""
_MAX_SOCKET_PATH = 107
_SOCKET = "vllm.sock"
_LONGEST_SOCKET = "x" * 36
"""A name as long as the names of vLLM's own sockets in the same directory."""
_SOCKET_DIR_PREFIX = "swarm-"


class WeightsRefused(EngineError):
    """The weights about to be served differ from the trained ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Weights to be served.

    weights_dir: folder of safetensors under the checkpoint's own names; None: the hosted model's own weights.
    approval: succeeds once the files are complete and match the trained weights; None: the weights are the model's own.
    adapter: served on top of the hosted weights.
    """

    weights_dir: Path | None = None
    approval: asyncio.Future[None] | None = None
    adapter: ServedAdapter | None = None

    @property
    def hosted(self) -> bool:
        """True if these are the hosted weights, unchanged."""
        return self.weights_dir is None and self.adapter is None

    async def approved(self) -> None:
        """Wait for the approval and raise its errors. Cancelling this wait does not cancel the approval, because others wait for it
        too."""
        if self.approval is not None:
            await asyncio.shield(self.approval)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTransfer:
    """How to bring weights to inference over the device.

    socket: path where the trainer will send them.
    send: makes the trainer send; returns the digest of what it sent.
    keep: starts writing the same weights to a folder, for a child that starts after a crash.
    failed: called with the error if the transfer fails.
    """

    socket: Path
    send: Callable[[], Awaitable[str]]
    keep: Callable[[], Published]
    failed: Callable[[BaseException], None]


class VllmInference(Sampler):
    """The inference half of an engine. Call all coroutines from one event loop.

    `boot`, `shutdown`, `render`, `decode`, `sample` and `stream` follow the contract of `swarm.engine.seam.Engine`.
    """

    def __init__(self, settings: VllmSettings, *, clock: Clock, back_off: BackOff | None = None) -> None:
        super().__init__(settings.model_dir, settings.model_name, settings.model_len)
        self.settings = settings
        self._clock = clock
        self._subscribers: list[Callable[[EngineHealth], None]] = []
        self._published = Published()
        self._started_with: ServedAdapter | None = None
        self._publishing = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._starting = False
        """Whether the newest child has yet to read the weights that it will serve."""
        self._socket_dir: Path | None = None
        self._client: VllmClient | None = None
        self._lived_at = clock.monotonic()
        self._changing = False
        work = ModelWork(model_dir=settings.model_dir, device=settings.device)
        self.silence_s = work.silence_s(settings.batched_tokens)
        """How long the child may be silent, in seconds: no token, and no answer from its engine core."""
        self._supervisor = Supervisor(
            start=self._start,
            ready=self._serve_what_was_published,
            on_health=self._tell,
            clock=clock,
            boot_s=work.boot_s(_IMPORTS_S[settings.device]),
            watch=self._watch,
            hopeless=self._out_of_memory,
            back_off=back_off,
        )

    @property
    def health(self) -> EngineHealth:
        return self._supervisor.health

    @property
    def process_id(self) -> int | None:
        """Process id of the serving child's reaper, for operators and tests."""
        return None if self._supervisor.child is None else self._supervisor.child.reaper_pid

    def subscribe(self, on_health: Callable[[EngineHealth], None]) -> None:
        """Call `on_health` on every change of health."""
        self._subscribers.append(on_health)

    async def boot(self) -> None:
        """Start the child and wait until it serves. Does nothing if called again. Raises: EngineDown with the reason."""
        await self._supervisor.boot()

    async def settled(self) -> None:
        """Wait until the child serves. Raises: EngineDown if it never will."""
        await self._supervisor.settled()

    async def shutdown(self) -> None:
        """Stop the child, leaving no processes, sockets or shared memory behind."""
        await self._supervisor.shutdown()
        await self._drop_client()

    # -- weights --------------------------------------------------------------------------------------------------

    async def publish(
        self,
        weights_dir: Path | None,
        version: WeightsVersion,
        *,
        approval: asyncio.Future[None] | None = None,
        adapter: ServedAdapter | None = None,
    ) -> None:
        """Serve other weights in place, under `version`. Calls in flight continue across the change; afterwards no call sees the
        previous weights.

        weights_dir: safetensors under the checkpoint's own names, preferably in memory; None: the hosted model's own weights. Keep the
            files until the next publish: a child that crashed is restarted with them.
        approval: checks the weights in the meantime; weights that it refuses answer no call.
        adapter: served on top of the hosted weights; requires weights_dir None.

        Does not wait for a child that is starting (`settled` does); that child begins with the new weights. If the change itself fails,
        the child is restarted with them. It is also restarted for a change between full weights and adapters, because only a child that
        reserves room for adapters has the slower layers that they need.

        Raises: WeightsRefused; then the previous weights are served.
        """
        async with self._publishing:
            wanted = Published(weights_dir=weights_dir, approval=approval, adapter=adapter)
            if wanted.hosted and self._published.hosted:
                self._spans.change(version, await self.sampled_so_far())
                return
            if not self._has_room(adapter):
                await self._start_with(wanted, version, failed=False)
                return
            if self._starting and await self._begins_with(wanted, version):
                return
            try:
                async with self._change_limited(weights_dir):
                    await self._change_weights(wanted, version)
            except WeightsRefused:
                await self._supervisor.restart()
                raise
            except (EngineError, TimeoutError) as error:
                await self._start_with(wanted, version, silence=self._failed_to_change(error))

    async def publish_over_device(self, transfer: DeviceTransfer, version: WeightsVersion) -> bool:
        """Like `publish`, but receive full weights over the device. Returns False if the child is not ready for that; then use
        `publish`.

        If the change itself fails, the child is restarted with the weights that `transfer.keep` writes.
        Raises: NotShared if nothing has changed, or any error from keeping the weights.
        """
        async with self._publishing:
            if self._starting or not self.health.ready or not self._has_room(None):
                return False
            try:
                async with self._change_limited(None):
                    await self._take_weights(transfer, version)
            except NotShared:
                raise
            except (EngineError, TimeoutError) as error:
                silence = self._failed_to_change(error)
                if isinstance(error, TimeoutError):
                    transfer.failed(error)
                await self._start_with(transfer.keep(), version, silence=silence)
            return True

    def _failed_to_change(self, error: EngineError | TimeoutError) -> Silence | None:
        """Log the error. Return a `Silence` if the child hangs, else None."""
        _LOG.warning("could not change weights in place (%r); restarting inference", error)
        hung = isinstance(error, EngineHung | TimeoutError)
        return self._silence(f"inference hangs while its weights are changed: {error}") if hung else None

    @asynccontextmanager
    async def _change_limited(self, weights_dir: Path | None) -> AsyncIterator[None]:
        """Limit the duration of the block, which changes weights, to what loading this folder may take (None: the hosted weights).
        Raises: TimeoutError."""
        limit_s = _CHANGES * self.silence_s + loading_s(weights_dir or self.settings.model_dir)
        with self._limited_otherwise():
            async with asyncio.timeout(limit_s):
                yield

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Within the block, free the device's memory for the trainer. Calls wait, and continue where they stopped.

        A child that fails to fall asleep keeps running; a child that fails to wake up is restarted. If the child was down or ends
        during the block, its supervisor starts it as usual.
        """
        async with self._publishing:
            try:
                await self._fall_asleep()
                yield
            finally:
                await self._wake_up()

    async def _fall_asleep(self) -> None:
        if not self.health.ready:
            return
        try:
            with self._limited_otherwise():
                await self._serving().sleep()
        except EngineError as error:
            _LOG.warning("inference stays awake: %s", error)

    async def _wake_up(self) -> None:
        if not self.health.ready:
            return  # it is being restarted, and starts awake
        try:
            with self._limited_otherwise():
                await self._serving().wake_up()
        except EngineError as error:
            _LOG.warning("inference does not wake up (%s); restarting it", error)
            silence = self._silence(f"inference does not wake up: {error}") if isinstance(error, EngineHung) else None
            await self._supervisor.restart(silence=silence)

    def _has_room(self, adapter: ServedAdapter | None) -> bool:
        """Return whether the running child can serve this adapter, or full weights for None."""
        if adapter is None or self._started_with is None:
            return adapter is None and self._started_with is None
        return adapter.room <= self._started_with.room

    async def _start_with(
        self,
        wanted: Published,
        version: WeightsVersion,
        *,
        failed: bool = True,
        silence: Silence | None = None,
    ) -> None:
        """Restart the child with these weights, or with the previous ones if these are refused.

        failed: whether the running child failed to load them; False: it was started for other weights or adapters.
        silence: set if the child hangs.
        """
        try:
            await wanted.approved()
            self._published = wanted
            self._spans.change(version, {})
        finally:
            await self._supervisor.restart(failed=failed, silence=silence)

    async def _begins_with(self, wanted: Published, version: WeightsVersion) -> bool:
        """Make a starting child read these weights. Returns False if it has already read others and serves."""
        await wanted.approved()
        # The child must finish reading the previous weights, because the next writer overwrites them.
        async with self._loading:
            if self._starting:
                self._published = wanted
                self._spans.change(version, {})
                return True
        await self._supervisor.settled()
        return False

    async def _change_weights(self, wanted: Published, version: WeightsVersion) -> None:
        client = self._serving()
        await client.pause()
        counts = await client.sampled_counts()
        if wanted.adapter is not None:
            await client.replace_adapter(self.settings.model_name, wanted.adapter.folder)
        else:
            await client.replace_weights(wanted.weights_dir or self.settings.model_dir)
        await client.forget_prefixes()
        await wanted.approved()
        self._published = wanted
        self._spans.change(version, counts)
        await client.resume()

    async def _take_weights(self, transfer: DeviceTransfer, version: WeightsVersion) -> None:
        """Receive the weights over the device. Raises: NotShared; EngineError if the received weights differ from the sent ones."""
        client = self._serving()
        await client.pause()
        counts = await client.sampled_counts()
        sent, taken = await asyncio.gather(
            transfer.send(),
            client.take_weights(transfer.socket, loading_s(self.settings.model_dir)),
            return_exceptions=True,
        )
        # Without the trainer, inference can only fail; if inference hangs, the trainer only says that nobody answered.
        order = (
            (taken, sent) if isinstance(taken, EngineHung) and not isinstance(sent, TrainerCrashed) else (sent, taken)
        )
        error = next((outcome for outcome in order if isinstance(outcome, BaseException)), None)
        if error is None and sent != taken:
            error = EngineError("the weights received over the device differ from those that were sent")
        if error is not None:
            transfer.failed(error)
        if isinstance(taken, NotShared):
            await client.resume()
            raise NotShared(f"cannot transfer weights over the device: {error}") from error
        if error is not None:
            raise error
        await client.forget_prefixes()
        self._published = transfer.keep()
        self._spans.change(version, counts)
        await client.resume()

    async def sampled_so_far(self) -> dict[str, int]:
        """Return how many tokens each request in flight has sampled, by the engine's own request id; empty while the child is down."""
        return await self._serving().sampled_counts() if self.health.ready else {}

    # -- the child ------------------------------------------------------------------------------------------------

    async def _start(self) -> ChildProcess:
        self.settings.check_memory()
        _LOG.info("starting inference: about %.1f GiB", self.settings.memory_needed() / GIB)
        await self._drop_client()
        self._socket_dir = _private_dir(self.settings.log_path.with_suffix(".socket-dir"))
        socket = self._socket_dir / _SOCKET
        self._client = VllmClient(socket, answer_s=self.silence_s)
        self._started_with, self._starting = self._published.adapter, True
        mask_folder(socket).mkdir()
        return await ChildProcess.start(self.settings.command(socket, self._started_with))

    async def _serve_what_was_published(self, _: ChildProcess) -> None:
        client = self._client
        if client is None:
            raise EngineDown("no child was started")
        while not await client.healthy():
            await self._clock.sleep(_PROBE_EVERY_S)
        async with self._loading:
            await self._drop_unkept()
            adapter = self._published.adapter
            if self._published.weights_dir is not None:
                await client.replace_weights(self._published.weights_dir)
                await client.forget_prefixes()
            elif adapter is not None and self._has_room(adapter):  # may be newer than the one it was started with
                await client.replace_adapter(self.settings.model_name, adapter.folder)
                await client.forget_prefixes()
            if not self._has_room(self._published.adapter):
                raise EngineDown("other weights were published while inference was starting")
            self._starting = False

    async def _drop_unkept(self) -> None:
        """Return to the hosted weights if the published ones, received over the device, could not be kept for this start. The owner
        publishes again when the child serves."""
        published = self._published
        try:
            await published.approved()
        except EngineError as error:
            if self._published is not published:
                return  # others were published meanwhile
            _LOG.warning(
                "inference starts with the hosted weights, because the served ones could not be kept: %s", error
            )
            self._published = Published()
            before = self._spans.version
            self._spans.change(WeightsVersion(run_id=before.run_id, branch=before.branch), {})

    def _out_of_memory(self, child: ChildProcess) -> str | None:
        """Return advice if the child ran out of GPU memory, which a restart would repeat; None if it ended for another reason."""
        if self.settings.device == "cpu" or not child.said(*OUT_OF_MEMORY):
            return None
        return (
            f"inference ran out of GPU memory with {self.settings.kv_bytes / GIB:.1f} GiB of keys and values for "
            f"{self.settings.sequences} sequences: end other programs on the GPU, or serve with a smaller --kv-cache-gib, --max-num-seqs or "
            "--max-model-len; `swarm serve --plan` shows what needs how much"
        )

    # -- signs of life --------------------------------------------------------------------------------------------

    async def _watch(self, _: ChildProcess) -> Silence:
        """Poll the engine core between its sampling steps; vLLM's own `/health` succeeds even if the core has stopped.

        Returns after `silence_s` without an answer or a token. Time during which this process was suspended does not count.
        """
        self._lives()
        asked: asyncio.Task[None] | None = None
        try:
            while self._changing or self._clock.monotonic() - self._lived_at < self.silence_s:
                if not self._changing and (asked is None or asked.done()):
                    asked = asyncio.create_task(self._ask_for_life())
                looked_at = self._clock.monotonic()
                await self._clock.sleep(_LOOK_EVERY_S)
                if self._clock.monotonic() - looked_at > _OVERRUN * _LOOK_EVERY_S:
                    self._lives()
        finally:
            if asked is not None:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
        return self._silence(f"{self.settings.child_name} has given no sign of life for {self.silence_s:.0f} s")

    async def _ask_for_life(self) -> None:
        if self._client is None:
            return
        try:
            await self._client.sampled_counts()
        except EngineError:
            return  # not a sign of life; other code notices if the child is gone
        self._lives()

    @contextmanager
    def _limited_otherwise(self) -> Iterator[None]:
        """Within the block, do not look for a hang: the engine core is busy with weights, and other time limits apply."""
        self._changing = True
        try:
            yield
            self._lives()
        finally:
            self._changing = False

    def _lives(self) -> None:
        self._lived_at = self._clock.monotonic()

    def _silence(self, reason: str) -> Silence:
        return Silence(reason=reason, since=self._clock.now() - (self._clock.monotonic() - self._lived_at))

    # -- the child ------------------------------------------------------------------------------------------------

    async def _drop_client(self) -> None:
        client, self._client = self._client, None
        directory, self._socket_dir = self._socket_dir, None
        if client is not None:
            await client.close()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def _serving(self) -> VllmClient:
        if self._client is None or not self.health.ready:
            raise EngineDown(self.health.reason or "inference is not booted")
        return self._client

    def _mask_folder(self) -> Path | None:
        return None if self._socket_dir is None else mask_folder(self._socket_dir / _SOCKET)

    @contextmanager
    def _server(self) -> Iterator[VllmClient]:
        yield self._serving()

    def _tell(self, health: EngineHealth) -> None:
        for subscriber in self._subscribers:
            subscriber(health)


def _private_dir(note: Path) -> Path:
    """Create a directory that only this user can enter, with a path short enough for its sockets.

    `note` is the file that records the directory, so that the next server can remove what a killed server left.
    """
    if note.exists() and (left := Path(note.read_text())).name.startswith(_SOCKET_DIR_PREFIX):
        shutil.rmtree(left, ignore_errors=True)
    for parent in (None, "/tmp"):
        directory = Path(tempfile.mkdtemp(prefix=_SOCKET_DIR_PREFIX, dir=parent))
        if len(str(directory / _LONGEST_SOCKET)) <= _MAX_SOCKET_PATH:
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, str(directory).encode())
            return directory
        directory.rmdir()
    raise EngineError("the temporary directory's path is too long for a Unix socket; set TMPDIR to a shorter one")
