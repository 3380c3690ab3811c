"""A worker's options. One field is one option: flag, environment variable and YAML key derive from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pagoda_proto import times
from pagoda_proto.adapters.identity import read_lora_modules
from pagoda_proto.errors import Problem
from pagoda_proto.options import check, option
from pagoda_proto.params import DEFAULT_MAX_TOKENS_PER_STEP
from pagoda_proto.pooling.kinds import AUTO, KINDS
from pagoda_worker.cores import available_cores
from pagoda_worker.device_choice import parse_device
from pagoda_worker.kernel_choice import parse_choice

AUTO_SWAP_SPACE = -1.0
QUANTIZATIONS = ("", "int8", "int4", "int4a16")
DTYPES = ("auto", "bfloat16", "float16", "float32")
INSTRUCTION_SETS = ("", "base", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx")
SPECULATIONS = ("", "suffix", "draft-model")
BLOCK_SIZES = {"cpu": 32, "cuda": 64}


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    model: str = option("", "model directory with config.json and safetensors files, or GGUF file")
    engine: str = option(
        "", "engine core address: unix:/path or host:port; separate several with commas", required=True
    )
    keys_dir: str = option("", "keys for links between hosts, as written by `pagoda keygen`")
    worker_id: str = option("", "stable name of this worker; empty: made from host and process id")
    drain_timeout_s: float = option(times.WORKER_DRAINS_S, "after SIGTERM, how long open requests may take to finish")
    alive_file: str = option("", "file to touch while the process works, once the model is loaded; for liveness probes")
    ready_file: str = option(
        "", "file to touch whenever the engine core acknowledges a heartbeat; for readiness probes"
    )
    device: str = option("auto", "cpu, cuda or cuda:N; auto (auto:N) takes a usable GPU if there is one, else the CPU")
    dtype: str = option(
        "auto",
        "bfloat16, float16, float32; auto: the checkpoint's, but bfloat16 for float16 on a CPU",
        words=DTYPES,
        otherwise="half is float16, float is float32",
    )
    quantization: str = option(
        "",
        "quantise weights on loading to int8, int4 or int4a16 (16-bit activations); empty: as in the checkpoint",
        words=QUANTIZATIONS,
        otherwise="leave it out where the checkpoint is quantised already, as is seen from its files",
    )
    kernels: str = option(
        "auto",
        "kernel back end: auto, reference, torch, native, triton; or one with exceptions: "
        "native,attention=torch or triton,attention=flash (auto takes flash-attention if it is installed and "
        "measured to be faster)",
    )
    instruction_set: str = option(
        "",
        "level of the native kernels: base, avx2, avxvnni, avx512, avx512vnni, avx512bf16, amx; empty: the "
        "best available",
        words=INSTRUCTION_SETS,
    )
    threads: int = option(0, "compute threads; 0: one per core that this process may use", most=4096)
    block_size: int = option(0, "tokens per KV block; 0: 32 on a CPU and 64 on a GPU", most=4096)
    kv_cache_gib: float = option(0.0, "memory for the KV cache; 0: sized from the machine's free memory")
    workers_here: int = option(
        1, "workers that share this machine's memory, if nothing says how much each may have", least=1, most=4096
    )
    kv_cache_dtype: str = option(
        "auto", "KV cache entries: auto (as computed) or int8, about half of bfloat16", words=("auto", "int8")
    )
    num_blocks: int = option(
        0,
        "KV blocks of the layers that keep most, with a matching number for other layers; 0: from "
        "kv_cache_gib or memory",
    )
    kv_retention: str = option(
        "window",
        "what layers with a sliding window keep: window, or all (more prefix hits, for more memory)",
        words=("window", "all"),
    )
    swap_space_gib: float = option(
        AUTO_SWAP_SPACE,
        "host memory for the KV blocks of preempted choices; -1: 4 (or less) on a GPU, none on a CPU",
        unset=AUTO_SWAP_SPACE,
    )
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory that may be in use; sizes its KV cache", least=0.01, most=1
    )
    enforce_eager: bool = option(False, "on a GPU, launch each operation of a decode step instead of recorded graphs")
    max_model_len: int = option(0, "maximum length of prompt plus output; 0: the workers' own limit", unset=0, least=2)
    max_rows: int = option(256, "most choices running at once on a worker", least=1, most=2**20)
    max_tokens_per_step: int = option(
        DEFAULT_MAX_TOKENS_PER_STEP, "most tokens in one step of a worker", least=1, most=2**20
    )
    speculation: str = option(
        "",
        "draft tokens and verify them: suffix (from the text itself and what the same tenant was told before), "
        "draft-model; empty: off",
        words=SPECULATIONS,
    )
    draft_model: str = option("", "model directory or GGUF file for draft-model; must have the model's vocabulary")
    draft_vocab_size: int = option(
        0,
        "the draft model only considers this many tokens, from the first on, as most vocabularies are ordered"
        " by frequency; 0: all",
    )
    max_drafts: int = option(0, "most tokens drafted at once for a choice; 0: 8", most=1024)
    lora_modules: str = option(
        "",
        'LoRA adapters (PEFT format) to serve beside the model: name=directory, or {"name": .., "path": ..}; '
        "as several values or separated by commas",
        several=True,
    )
    lora_dir: str = option("", "directory from which adapters may be loaded while serving; empty: none")
    max_loras: int = option(
        8, "most adapters in use at once; others wait, or replace one that is idle", least=1, most=1024
    )
    max_lora_rank: int = option(64, "highest rank of an adapter", least=1, most=4096)
    max_lora_gib: float = option(
        0.0, "memory for each of max_loras; 0: what max_lora_rank takes, or the largest of lora_modules"
    )
    max_lora_bytes: int = option(1024**3, "maximum size of an adapter's file", least=1, most=2**36)
    task: str = option(
        AUTO,
        "what the model is for: generate, embed, classify (also for reranking); auto: decided from the model's files",
        words=(AUTO, *KINDS),
    )
    fallback: bool = option(True, "run architectures without a native implementation through transformers")

    def __post_init__(self) -> None:
        check(self, _further_problems(self))

    @property
    def takes_adapters(self) -> bool:
        return bool(self.lora_modules or self.lora_dir)

    def settled(self, device_type: str) -> WorkerConfig:
        """Fill in the defaults: block_size by kind of device, and one thread per core."""
        block_size = self.block_size or BLOCK_SIZES[device_type]
        return replace(self, block_size=block_size, threads=self.threads or available_cores())


def _further_problems(config: WorkerConfig) -> Iterator[Problem]:
    for name, parse, text in (("kernels", parse_choice, config.kernels), ("device", parse_device, config.device)):
        try:
            parse(text)
        except ValueError as error:
            yield Problem(name, str(error))
    try:
        read_lora_modules(config.lora_modules)
    except ValueError as error:
        yield Problem("lora_modules", str(error))
    if config.alive_file and config.alive_file == config.ready_file:
        yield Problem("ready_file", "ready_file must not be alive_file: a worker can be alive without being ready")
    if config.block_size % 16:
        yield Problem("block_size", f"block_size must be a multiple of 16, got {config.block_size}")
    if bool(config.draft_model) != (config.speculation == "draft-model"):
        yield Problem("draft_model", "draft_model and speculation=draft-model must be given together")
    if config.draft_vocab_size and not config.draft_model:
        yield Problem("draft_vocab_size", "draft_vocab_size is given, but no draft_model")
    if config.max_drafts and not config.speculation:
        yield Problem("max_drafts", "max_drafts is given, but speculation is off")
