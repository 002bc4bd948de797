"""The policies that come with Outpace, one file per family."""

from collections.abc import Mapping

from outpace.errors import ConfigError
from outpace.inject.policies import (
    bert,
    bloom,
    cohere,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    gptj,
    granite,
    llama,
    moe,
    mpt,
    opt,
    phi,
    phi3,
    stablelm,
    starcoder2,
)
from outpace.inject.policy import Policy

POLICIES: tuple[Policy, ...] = (
    *bert.POLICIES,
    *cohere.POLICIES,
    *gemma.POLICIES,
    *granite.POLICIES,
    *llama.POLICIES,
    *moe.POLICIES,
    *mpt.POLICIES,
    *phi3.POLICIES,
    *starcoder2.POLICIES,
    *bloom.POLICIES,
    *falcon.POLICIES,
    *gpt2.POLICIES,
    *gpt_neox.POLICIES,
    *gptj.POLICIES,
    *opt.POLICIES,
    *phi.POLICIES,
    *stablelm.POLICIES,
)


class Registry:
    """Policies that people bring, by the class name of the layers they are for."""

    def __init__(self) -> None:
        self.policies: dict[str, Policy] = {}

    def take(self, policy: Policy, *, replace: bool) -> None:
        """Keep a policy; another one for the same class is an error, unless it is to be replaced."""
        taken = [name for name in policy.layers if self.policies.get(name, policy) != policy]
        if taken and not replace:
            raise ConfigError(
                f"register_policy: {', '.join(taken)} has another policy already; give replace=True to have this one"
            )
        self.policies.update(dict.fromkeys(policy.layers, policy))


REGISTRY = Registry()
"""The one place where policies are kept that did not come with Outpace."""


def register_policy(policy: Policy, *, replace: bool = False) -> None:
    """Use `policy` for the layers it names from now on, before any policy that comes with Outpace."""
    if not isinstance(policy, Policy):
        raise ConfigError(f"register_policy: expected a Policy, got {type(policy).__name__}")
    REGISTRY.take(policy, replace=replace)


def by_class() -> Mapping[str, Policy]:
    """Policies by the class name of the layers they are for; a registered one stands before one of Outpace's own."""
    own = {name: policy for policy in POLICIES for name in policy.layers}
    return own | REGISTRY.policies
