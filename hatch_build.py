"""Build hook: compiles the CPU kernels when the package is installed, if this machine has a C++ compiler."""

from __future__ import annotations

import runpy
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = "worker/pagoda_worker/kernels/cpu/build.py"


class KernelBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Leaves the library beside its loader; a wheel with it is for this platform, one without it for any."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        script = runpy.run_path(f"{self.root}/{BUILD}")
        try:
            library = script["LIBRARY"] if script["is_current"]() else script["build"]()
        except script["CompileError"] as error:
            self.app.display_warning(f"the CPU kernels could not be compiled; the torch back end will serve.\n{error}")
            return
        if library is None:
            self.app.display_warning("no C++ compiler: the CPU kernels are left out; the torch back end will serve.")
            return
        build_data["artifacts"].append("worker/pagoda_worker/kernels/cpu/libpagoda.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{self._platform()}"

    @staticmethod
    def _platform() -> str:
        import sysconfig

        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
