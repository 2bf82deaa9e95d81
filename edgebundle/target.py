"""The target of a request: a model on one device, or on any device of a group."""

from __future__ import annotations

from dataclasses import dataclass

from agent.wire import topics
from edgebundle.errors import UsageError


@dataclass(frozen=True, slots=True)
class Target:
    """A model on a device, or on a group.

    Attributes
    ----------
    name
        The name of the device or of the group.
    model
        The model's name.
    is_group
        Whether any device of a group may answer.
    topic
        Where requests are published.
    state_filter
        The filter for the model's state: of the device, or of all devices that have the model.
    presence_topic
        Where the device says whether it is online; empty for a group.
    has_user
        Whether the topic says who asks.
    """

    name: str
    model: str
    is_group: bool
    topic: str
    state_filter: str
    presence_topic: str
    has_user: bool

    @classmethod
    def of(cls, name: str, model: str, *, user: str = "", is_group: bool = False) -> Target:
        """Check the names.

        Parameters
        ----------
        name, model, is_group
            As the attributes.
        user
            The client's name, as the broker knows it; empty for a client without one.

        Raises
        ------
        UsageError
            If no agent, group or model can have them.
        """
        what = topics.GroupInfer(name, model, user) if is_group else topics.Infer(name, model, user)
        try:
            topic = topics.format_topic(what)
        except ValueError as error:
            kind = "a group" if is_group else "an agent"
            raise UsageError(
                f"expected the names of {kind} and a model, got {name!r:.80} and {model!r:.80}",
                hint="`edgebundle agents` lists the agents and their models",
            ) from error
        if is_group:
            return cls(name, model, is_group, topic, topics.model_states_filter(model), "", bool(user))
        state = topics.format_topic(topics.ModelState(name, model))
        presence = topics.format_topic(topics.State(name))
        return cls(name, model, is_group, topic, state, presence, bool(user))
