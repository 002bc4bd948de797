"""The policies that come with Outpace, a file for each group of related families."""

from collections.abc import Mapping
from typing import NoReturn

from outpace.errors import ConfigError
from outpace.inject.policies import bert, bloom, falcon, gemma, gpt2, gpt_neox, gptj, granite, llama, moe, mpt, opt
from outpace.inject.policy import Policy

_FAMILIES = (bert, bloom, falcon, gemma, gpt2, gpt_neox, gptj, granite, llama, moe, mpt, opt)
POLICIES: tuple[Policy, ...] = tuple(policy for family in _FAMILIES for policy in family.POLICIES)


def by_class() -> Mapping[str, Policy]:
    """Policies by the class name of the layers they are for."""
    return {name: policy for policy in POLICIES for name in policy.layers}


def register_policy(policy: Policy, *, replace: bool = False) -> NoReturn:
    """Removed: policies are an argument of each call, not state of the process."""
    raise ConfigError(
        "register_policy: policies are not kept for the whole process; give one to each call that needs it: "
        "init_inference(model, injection_policy={LayerClass: policy}), and likewise LLM and verify"
    )
