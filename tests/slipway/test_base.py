from __future__ import annotations

import os
import re
import shutil

import pytest

from registry import Registry
from slipway.base import group_name, model_name, register_base
from slipway.home import Home

GROUP = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path / "home")
    made.folder.mkdir()
    return made


@pytest.fixture
def registry(home):
    made = Registry.open(home.database_url(None), home.store)
    made.db.create_all()
    yield made
    made.db.close()


@pytest.fixture
def taken(registry, home):
    """Registers a folder; (the version, what a person was told)."""
    tenant = registry.tenants.ensure_tenant("default")

    def register(folder):
        said: list[str] = []
        return register_base(registry, tenant, folder, str(folder), home, said.append), said

    return register


def test_it_is_taken_once_and_looked_at_no_more(taken, registry, tiny_base, tmp_path):
    folder = shutil.copytree(tiny_base, tmp_path / "org--tiny")
    first, said = taken(folder)
    assert len(said) == 1
    assert (first.reference, first.base_model) == ("tiny/1", "org/tiny")
    assert (first.kind, first.origin) == ("merged", "import")
    assert first.base_digest == first.digest
    assert first.parents == []
    assert registry.store.verify(first.digest) == []
    again, said = taken(folder)
    assert again.id == first.id
    assert said == []
    assert list((registry.store.path(first.digest).parents[1] / ".staging").iterdir()) == []


def test_a_touched_file_is_looked_at_again_and_a_changed_one_is_a_new_version(
    taken, registry, tiny_base, tmp_path
):
    folder = shutil.copytree(tiny_base, tmp_path / "org--tiny")
    first, _ = taken(folder)
    os.utime(folder / "config.json", (1, 1))
    touched, said = taken(folder)
    assert touched.id == first.id
    assert len(said) == 1
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    changed, _ = taken(folder)
    assert changed.reference == "tiny/2"
    assert changed.base_digest == changed.digest != first.digest
    # The weights of the first are still there, whatever became of the folder.
    shutil.rmtree(folder)
    assert registry.store.verify(first.digest) == []


def test_what_else_lies_in_the_folder_stays_out(taken, registry, tiny_base, tmp_path):
    folder = shutil.copytree(tiny_base, tmp_path / "org--tiny")
    (folder / "pytorch_model.bin").write_bytes(b"no")
    (folder / "modeling.py").write_text("no")
    version, _ = taken(folder)
    names = {file.path for file in version.files}
    assert "model.safetensors" in names
    assert not names & {"pytorch_model.bin", "modeling.py"}


@pytest.mark.parametrize("garbage", ["", "[]", "null", "{", '{"folder": 1}'])
def test_a_damaged_record_costs_a_look_and_no_more(taken, home, tiny_base, garbage):
    first, _ = taken(tiny_base)
    (home.folder / "base.json").write_text(garbage)
    again, _ = taken(tiny_base)
    assert again.id == first.id


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("org/Qwen 3 (é)", "qwen-3"),
        ("..", "base"),
        ("x" * 200, "x" * 63),
    ],
)
def test_any_model_gets_a_group_it_may_have(name, group):
    assert group_name(name).rstrip("-") == group
    assert GROUP.fullmatch(group_name(name))


def test_a_hub_id_is_a_name_and_a_folder_of_the_cache_carries_one(tmp_path):
    folder = tmp_path / "org--model--x"
    folder.mkdir()
    assert model_name("org/model", folder) == "org/model"
    assert model_name(str(folder), folder) == "org/model--x"
