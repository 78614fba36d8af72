"""A Ray cluster's job server in memory, behind the calls of Ray's own client: jobs begin and end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass
class FakeJobServer:
    """away: it cannot be reached. full: no job begins, and one that is stopped stays where it is. late: jobs that nobody sees
    until their name is wanted again: what a killed process had sent is still on its way. unheard: jobs whose output cannot be had."""

    away: bool = False
    full: bool = False
    jobs: dict[str, SimpleNamespace] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    unheard: set[str] = field(default_factory=set)
    asked: int = 0

    def submit_job(
        self,
        *,
        entrypoint: str,
        submission_id: str,
        runtime_env: dict[str, Any],
        metadata: dict[str, str],
        entrypoint_num_cpus: float,
    ) -> str:
        self._reached()
        if submission_id in self.jobs:
            self.late.discard(submission_id)
            raise RuntimeError("Request failed with status code 500")
        self.jobs[submission_id] = SimpleNamespace(
            submission_id=submission_id,
            status="PENDING" if self.full else "RUNNING",
            driver_exit_code=None,
            error_type=None,
            message="",
            metadata=metadata,
            runtime_env=runtime_env,
            archive=Path(runtime_env["working_dir"]).read_bytes(),
        )
        return submission_id

    def get_job_info(self, job_id: str) -> Any:
        self._reached()
        if job_id not in self.jobs or job_id in self.late:
            raise RuntimeError("Request failed with status code 404")
        return self.jobs[job_id]

    def list_jobs(self) -> Sequence[Any]:
        self._reached()
        return [job for name, job in self.jobs.items() if name not in self.late]

    def get_job_logs(self, job_id: str) -> str:
        self._reached()
        if job_id in self.unheard:
            raise RuntimeError("Request failed with status code 500")
        return f"{job_id} spoke\n"

    def stop_job(self, job_id: str) -> bool:
        if not self.full:
            self.end(job_id, status="STOPPED")
        return True

    def get_address(self) -> str:
        return "http://ray.test:8265"

    def end(self, job_id: str, **how: Any) -> None:
        job = self.get_job_info(job_id)
        if job.status in ("PENDING", "RUNNING"):
            vars(job).update(how)

    def _reached(self) -> None:
        self.asked += 1
        if self.away:
            raise ConnectionError("Failed to connect to Ray at address: http://ray.test:8265.")
