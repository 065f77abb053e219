"""Environments of other packages: their ids are found, and what is missing is named with the line that brings it."""

import sys
from pathlib import Path

import gymnasium as gym
import pytest

from envs import families, third_party
from runtime.user_error import UserError


@pytest.mark.parametrize(("env_id", "line"), [
    ("MinAtar/Breakout-v1", "; pip install minatar"),
    ("popgym-RepeatFirstEasy-v0", "there is no module 'popgym'; pip install popgym"),
    ("dm_control/walker-walk-v0", "there is no module 'shimmy'; pip install 'shimmy[dm-control]'"),
    ("gym_pusht/PushT-v0", "there is no module 'gym_pusht'; pip install gym-pusht"),
    ("panda_gym:PandaReach-v3", "there is no module 'panda_gym'; pip install panda-gym"),
    ("crafter", "is unknown; crafter (pip install crafter ruamel.yaml): --env examples.third_party_envs:crafter"),
    ("jumanji", "(pip install jumanji): --env examples.third_party_envs:snake"),
    ("dm_control", "(pip install 'shimmy[dm-control]'): --env dm_control/walker-walk-v0"),
    ("procgen", "a function of your own that adapts the API of old gym, as in examples.third_party_envs"),
])
def test_known_packages_say_what_to_install_and_to_type(env_id: str, line: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("minatar", "popgym", "shimmy", "gym_pusht", "panda_gym"):
        monkeypatch.setitem(sys.modules, module, None)  # missing, whether it is installed or not
    with pytest.raises(UserError) as refused:
        families.find_spec(env_id)
    assert str(refused.value).startswith(f"--env={env_id}")
    assert line in str(refused.value)


def test_a_namespace_or_a_known_beginning_imports_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             request: pytest.FixtureRequest) -> None:
    register = "gymnasium.register('{}', 'gymnasium.envs.classic_control:PendulumEnv')\n"
    (tmp_path / "space_for_test.py").write_text("import gymnasium\n" + register.format("space_for_test/Tiny-v0"))
    (tmp_path / "called_for_test.py").write_text(
        "import gymnasium\ndef register():\n    " + register.format("CalledForTest-v0"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(third_party.REGISTERED_BY, "CalledFor", "called_for_test:register")
    for env_id in ("space_for_test/Tiny-v0", "CalledForTest-v0"):
        request.addfinalizer(lambda env_id=env_id: gym.registry.pop(env_id))
        assert families.find_spec(env_id).id == env_id
        assert families.find_spec(env_id).id == env_id, "it is not registered twice"
