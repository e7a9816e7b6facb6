"""Loads and unloads adapters for clients with a key, from one folder that the server's operator has named."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from rooftile.engine.adapters.names import LONGEST_NAME, check_name
from rooftile.errors import InvalidInput
from rooftile.server.engine.calls import EngineDown, EngineRefused
from rooftile.server.refusals import Refusal, retry_later
from rooftile.server.service import Service


class LoadAdapterForm(BaseModel):
    """`POST /v1/load_lora_adapter`: a name, and a folder below --adapter-folder."""

    model_config = ConfigDict(extra="forbid")
    lora_name: str = Field(max_length=LONGEST_NAME)
    lora_path: str = Field(max_length=1024)


class UnloadAdapterForm(BaseModel):
    """`POST /v1/unload_lora_adapter`: a name."""

    model_config = ConfigDict(extra="forbid")
    lora_name: str = Field(max_length=LONGEST_NAME)


def check_may_change(service: Service) -> Path:
    """Returns the folder that adapters come from.

    Raises:
        Refusal: the server has none, or no keys.
    """
    folder = service.settings.adapter_folder
    if folder is None or not service.settings.keys:
        lacks = "--adapter-folder" if folder is None else "keys"
        why = f"adapters cannot be loaded or unloaded: the server has no {lacks}; start it with --adapter-folder and a key"
        raise Refusal("unsupported", why)
    return folder


async def load_adapter(service: Service, form: LoadAdapterForm) -> None:
    """Loads an adapter into all engines.

    Raises:
        Refusal: the name or the folder may not be, or an engine refuses the adapter; then no engine has it.
    """
    root = check_may_change(service).resolve()
    path = (root / form.lora_path).resolve() if "\0" not in form.lora_path else root
    # a link that leads out of the folder, too
    if path == root or not path.is_relative_to(root):
        raise Refusal(
            "invalid_value", f"lora_path is {form.lora_path[:128]!r}; must be below --adapter-folder", param="lora_path"
        )
    try:
        check_name(form.lora_name)
    except InvalidInput as error:
        raise Refusal("invalid_value", str(error), param="lora_name") from None
    if form.lora_name == service.settings.served_model_name:
        raise Refusal("invalid_value", f"lora_name is {form.lora_name!r}, the model's name; give another", param="lora_name")
    await _change(service, form.lora_name, str(path), shown=form.lora_path)


async def unload_adapter(service: Service, form: UnloadAdapterForm) -> None:
    """Unloads an adapter from all engines; answers that have begun end with it.

    Raises:
        Refusal: there is no such adapter.
    """
    check_may_change(service)
    if form.lora_name not in service.adapters:
        raise Refusal("model_not_found", f"there is no adapter {form.lora_name!r}", param="lora_name")
    await _change(service, form.lora_name, None)


async def _change(service: Service, name: str, path: str | None, shown: str = "") -> None:
    engines = service.check()[0]
    # one after the other: two changes of one name must not meet
    async with service.adapter_change:
        try:
            await engines.change_adapter(name, path)
        except EngineDown as error:
            raise retry_later("engine_down", str(error), 2) from None
        except EngineRefused as error:
            said = str(error) if path is None else str(error).replace(path, shown)
            raise Refusal("invalid_value", said, param="lora_name" if path is None else "lora_path") from None
        if path is None:
            service.adapters.pop(name, None)
        else:
            service.adapters[name] = path
