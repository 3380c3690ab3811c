"""One model in this process: its text side, an engine core, and a runner in place of workers.

The parts are the server's, so the tokens are the server's. Limits of a server's queue are off, because they make no
sense for a caller that submits all prompts at once.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pagoda.offline.outputs import OfflineRequest
from pagoda.settings.options import ModelSourceConfig
from pagoda.settings.problems import ConfigError
from pagoda.settings.resolving import from_keywords
from pagoda.tools import checkpoints
from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.engine import EngineCore
from pagoda_engine_core.workers.executor import InprocExecutor
from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.adapters.files import AdapterError, identify
from pagoda_proto.adapters.identity import Adapter, read_lora_modules
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.params import ModelLimits, SamplingParams, check_for_model
from pagoda_proto.records import Generate, RequestRecord
from pagoda_worker.config import WorkerConfig
from pagoda_worker.library_choice import choose_libraries

NO_LIMIT = 2**31 - 1

Prompt = str | list[int] | Mapping[str, Any]


class LoRARequest(NamedTuple):
    """An adapter to use, with the arguments of vLLM's class; `lora_int_id` is ignored.

    Without a path, it is the adapter of this name in `lora_modules`; otherwise the one at the path, which must be one
    of these or in `lora_dir`.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class Local:
    """The wired parts. The owner drives `engine`, by calling `step` or by a thread in `run`. `adapters` are those of
    `lora_modules`, by name; others are read when requested, from files of up to `most_bytes`.
    """

    def __init__(
        self, text: ModelText, engine: EngineCore, adapters: Mapping[str, Adapter] | None = None, most_bytes: int = 0
    ) -> None:
        self._adapters = dict(adapters or {})
        self._most_bytes = most_bytes
        self._pid = os.getpid()
        self.text = text
        self.engine = engine
        engine.step(0.0)  # the runner joins, which makes its limits known
        load = engine.load()
        self.limits = ModelLimits(load.vocab_size, load.max_model_len)
        self.readings = engine.admission.readings

    @staticmethod
    def load(model: str | Local, options: Mapping[str, Any]) -> Local:
        """Load a model and wire its parts; a `Local` takes no options and is returned as it is.

        Raises:
            TypeError: an unknown option.
            ConfigError: options or model files that cannot be used.
        """
        if isinstance(model, Local):
            if options:
                raise TypeError(f"a model that is already loaded takes no options, got {', '.join(options)}")
            return model
        settings = from_keywords(model=model, **_spelt(options))
        choose_libraries()
        from pagoda_worker.process.loop import Identity
        from pagoda_worker.process.startup import load_runner  # imports torch, so bad options are reported before

        model_dir = checkpoints.locate(model, settings.build(ModelSourceConfig).revision)
        try:
            text = ModelText.load(model_dir, task=settings.build(WorkerConfig).task)
            worker = settings.build(WorkerConfig, model=str(model_dir))
            runner = load_runner(worker, lambda done, total: None)
            named = read_lora_modules(worker.lora_modules).items()
            adapters = {name: identify(Path(one.path).absolute(), worker.max_lora_bytes) for name, one in named}
        except ValueError as error:
            raise ConfigError([f"model {model or model_dir}: {error}"]) from error
        config = settings.build(
            EngineConfig, max_queued_requests=NO_LIMIT, max_queued_tokens=2**53, queue_timeout_s=1e9
        )
        hello = Identity.of_this_process().hello(runner.facts)
        return Local(text, EngineCore(config, InprocExecutor(runner, hello)), adapters, worker.max_lora_bytes)

    def check_process(self) -> None:
        """Raises PagodaError in a fork of the process that made it."""
        if os.getpid() != self._pid:
            message = "this model was loaded before a fork, and its threads do not exist in this process"
            raise PagodaError(ErrorCode.UNAVAILABLE, message)

    def default_params(self) -> SamplingParams:
        """The parameters that the model's author recommends, with no limit but the context."""
        return SamplingParams(**self.text.sampling_defaults)

    def adapter(self, asked: LoRARequest | str | None) -> Adapter | None:
        """Raises InvalidParams for a name that is not in `lora_modules`, or files that are not an adapter's."""
        if asked is None:
            return None
        if not isinstance(asked, LoRARequest | str):
            rule = "must be one LoRARequest or name, for all prompts"
            raise InvalidParams([Problem("lora_request", f"{rule}, got {type(asked).__name__}")])
        name, path = (asked, "") if isinstance(asked, str) else (asked.lora_name, asked.lora_path)
        if not path and name not in self._adapters:
            known = ", ".join(map(repr, self._adapters)) or "none"
            raise InvalidParams([Problem("lora_request", f"{name[:64]!a} is not in lora_modules, which has {known}")])
        try:
            return identify(Path(path).absolute(), self._most_bytes) if path else self._adapters[name]
        except AdapterError as error:
            raise InvalidParams([Problem("lora_request", str(error))]) from error

    def adapter_of(self, digest: str) -> Adapter:
        """Raises PagodaError if `lora_modules` has no adapter of this content."""
        found = next((each for each in self._adapters.values() if each.digest == digest), None)
        if found is None:
            here = ", ".join(f"{name!r} of digest {each.digest}" for name, each in self._adapters.items()) or "none"
            message = f"it was made with an adapter of digest {digest}; lora_modules has {here}"
            raise PagodaError(ErrorCode.MODEL_NOT_FOUND, message, "lora_modules")
        return found

    def open(
        self, prompt: Prompt, params: SamplingParams, request_id: str = "", adapter: Adapter | None = None
    ) -> OfflineRequest:
        """Make a request that is checked against the model and ready to submit.

        Raises:
            PagodaError: the prompt or the parameters do not fit the model.
        """
        text, token_ids = self.read(prompt)
        check_for_model(params, token_ids, self.limits)
        record = RequestRecord(
            request_id=request_id or secrets.token_hex(16),
            prompt_token_ids=token_ids,
            task=Generate(
                params=params,
                seed=secrets.randbits(64) if params.seed is None else params.seed,
                eos_token_ids=self.text.eos_token_ids,
            ),
            adapter=adapter,
        )
        return OfflineRequest(record, text, self.text)

    def read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if given as text, and its tokens. Raises InvalidParams if it is not a prompt."""
        given = content_of(prompt)
        return (given, self.text.encode(given)) if isinstance(given, str) else (None, given)


def content_of(prompt: Prompt) -> str | list[int]:
    """A prompt's text or token ids. Raises InvalidParams if it is not a prompt."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
            message = f"a prompt object must have either prompt or prompt_token_ids, got {sorted(prompt)}"
            raise InvalidParams([Problem("prompt", message)])
        (value,) = prompt.values()
        return content_of(value)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        raise InvalidParams([Problem("prompt", "must be text or a list of token ids")])
    return list(prompt)


def _spelt(options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts `lora_modules`, which may also be a mapping, to its text form."""
    named = options.get("lora_modules")
    text = ",".join(f"{name}={path}" for name, path in named.items()) if isinstance(named, Mapping) else named
    return dict(options) | ({} if text is None else {"lora_modules": text})


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, always as a list; a list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several = list(prompts)
    if several and isinstance(several[0], int):
        return [several]  # type: ignore[list-item]
    return several  # type: ignore[return-value]


def failure(errors: Mapping[int, PagodaError]) -> PagodaError:
    """Combine errors, by prompt number, into one."""
    first = next(iter(errors.values()))
    told = [f"prompt {index}: {error.message}" for index, error in list(errors.items())[:10]]
    more = f"; and {len(errors) - 10} more" if len(errors) > 10 else ""
    return PagodaError(first.code, "; ".join(told) + more, first.param)
