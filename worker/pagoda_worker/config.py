"""What a worker can be told. One field is one option: flag, environment variable and YAML key derive from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pagoda_proto.options import option
from pagoda_worker.device_choice import parse_device
from pagoda_worker.kernel_choice import parse_choice

AUTO_SWAP_SPACE = -1.0
QUANTIZATIONS = ("", "int8", "int4", "int4a16")
WORDS = {
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "quantization": QUANTIZATIONS,
    "instruction_set": ("", "base", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16"),
    "kv_cache_dtype": ("auto", "int8"),
    "speculation": ("", "ngram", "draft-model"),
}
BLOCK_SIZES = {"cpu": 32, "cuda": 64}


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    model: str = option("", "model directory: config.json and safetensors files")
    engine: str = option("", "ZMQ address of the engine core: ipc:///path or tcp://host:port")
    keys_dir: str = option("", "keys for links that leave the host, as `pagoda keygen` writes them")
    worker_id: str = option("", "stable name of this worker; made from host and process id when empty")
    alive_file: str = option("", "touched whenever the engine core acknowledges a beat; for health checks")
    device: str = option("auto", "cpu, cuda or cuda:N; auto takes a GPU if a usable one is there, else the CPU")
    dtype: str = option("auto", "bfloat16, float16, float32; auto: the checkpoint's, with bfloat16 for float16 on CPU")
    quantization: str = option(
        "", "weights as int8, int4 or int4a16 (16-bit activations); empty: as the checkpoint has them"
    )
    kernels: str = option(
        "auto",
        "kernel back end: auto, reference, torch, native, triton; or one with exceptions: native,attention=torch, "
        "triton,attention=flash (auto takes flash-attention if it is installed and measured to be faster)",
    )
    instruction_set: str = option(
        "", "level of the native kernels: base, avx2, avxvnni, avx512, avx512vnni, avx512bf16; empty: the best"
    )
    threads: int = option(0, "compute threads; 0 takes every core this process may use")
    block_size: int = option(0, "tokens per KV block; 0 takes 32 on a CPU and 64 on a GPU")
    kv_cache_gib: float = option(0.0, "memory for the KV cache; 0 sizes it from what the machine has free")
    kv_cache_dtype: str = option("auto", "KV cache entries: auto (as computed) or int8, about half of bfloat16")
    num_blocks: int = option(0, "KV blocks, instead of kv_cache_gib; 0 means by memory")
    swap_space_gib: float = option(
        AUTO_SWAP_SPACE,
        "host memory where preempted choices keep their KV blocks; -1: 4 (or less) on a GPU, none on a CPU",
    )
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory that may be in use; sizes the KV cache there")
    enforce_eager: bool = option(False, "on a GPU, launch every operation of a decode step instead of recorded graphs")
    max_model_len: int = option(0, "longest prompt plus output; 0 takes the model's own limit")
    max_rows: int = option(256, "most choices at once")
    max_tokens_per_step: int = option(8192, "most tokens one step may compute")
    speculation: str = option("", "guess tokens and verify them: ngram, draft-model; empty: off")
    draft_model: str = option("", "model directory for draft-model; same vocabulary as the model")
    max_drafts: int = option(0, "most tokens guessed at once for a choice; 0: 8")
    fallback: bool = option(True, "run architectures without a native implementation through transformers")

    def __post_init__(self) -> None:
        problems = [*_unknown_words(self)]
        if not 0 < self.gpu_memory_utilization <= 1:
            problems.append(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization:g}"
            )
        if self.block_size < 0 or self.block_size % 16:
            problems.append(f"block_size must be a multiple of 16, got {self.block_size}")
        if self.kv_cache_gib < 0:
            problems.append(f"kv_cache_gib must not be negative, got {self.kv_cache_gib}")
        if self.swap_space_gib < 0 and self.swap_space_gib != AUTO_SWAP_SPACE:
            problems.append(f"swap_space_gib must not be negative, or -1 for the default, got {self.swap_space_gib}")
        problems += _speculation_problems(self)
        if problems:
            raise ValueError("; ".join(problems))

    def settled(self, device_type: str) -> WorkerConfig:
        """With block_size as this kind of device likes it, if nobody said it."""
        return replace(self, block_size=self.block_size or BLOCK_SIZES[device_type])


def _unknown_words(config: WorkerConfig) -> Iterator[str]:
    for name, known in WORDS.items():
        value = getattr(config, name)
        if value not in known:
            empty = "empty or " if "" in known else ""
            yield f"{name} must be {empty}one of {', '.join(filter(None, known))}, got {value!r}"
    for parse, text in ((parse_choice, config.kernels), (parse_device, config.device)):
        try:
            parse(text)
        except ValueError as error:
            yield str(error)


def _speculation_problems(config: WorkerConfig) -> Iterator[str]:
    if bool(config.draft_model) != (config.speculation == "draft-model"):
        yield "draft_model and speculation=draft-model go together"
    if config.max_drafts < 0:
        yield f"max_drafts must not be negative, got {config.max_drafts}"
    if config.max_drafts and not config.speculation:
        yield "max_drafts is given, but speculation is off"
