"""Opens stores by URL."""

from __future__ import annotations

from pathlib import Path

from agentlightning.errors import ConfigError, PluginError
from agentlightning.plugin.registry import get_manager
from agentlightning.records import DEFAULT_RUN_ID
from agentlightning.run.directory import inside
from agentlightning.store.engine import BackendStore
from agentlightning.store.protocol import LightningStore
from agentlightning.store.retention import RetentionPolicy
from agentlightning.store.url import hide_password


def create_store(
    url: str, *, run: str | None = None, token: str | None = None, retention: RetentionPolicy | None = None
) -> LightningStore:
    """Opens the store that a URL or the directory of a run names, scoped to a run.

    The scheme is the name of a component of kind ``store``, whose class has
    ``from_url(url, *, run_id, token) -> LightningStore``.

    Args:
        url: such as ``memory://``, ``sqlite:///runs/store.db``, ``postgresql://...`` or ``http://host:4747``
            (``http://a:4747,http://b:4747`` for several servers of one store). A directory such as ``runs/demo-1``
            stands for the ``store.db`` in it.
        run: the run whose queue and latest resources the store sees; None is the run ``default``.
        token: for served stores only.
        retention: a ``Retention``; None keeps all rollouts. Not for served stores: their server decides.

    Raises:
        ConfigError: ``url`` is neither a URL nor a directory with a ``store.db``, which may be no link to another
            directory, or the store cannot read the URL.
        PluginError: no installed plugin offers a store of this scheme.
    """
    if url and "://" not in url and (file := Path(url, "store.db")).is_file():
        for suffix in ("", "-wal", "-shm", "-journal"):  # SQLite writes to them, and someone else may have made them
            inside(Path(url), file.with_name(file.name + suffix))
        url = f"sqlite:///{file}"
    scheme, separator, _ = url.partition("://")
    if not separator or not scheme:
        shown = "***" + url.rpartition("@")[2] if "@" in url else url
        raise ConfigError(
            f"store {shown!r} is neither a URL nor a directory with a store.db; write memory://, http://host:4747, "
            f"or sqlite:///{shown or 'store.db'} for a file"
        )
    cls = get_manager().get("store", scheme.lower())
    from_url = getattr(cls, "from_url", None)
    if from_url is None:
        raise PluginError(f"the store {scheme!r} cannot be opened by URL: {cls!r} has no classmethod from_url")
    store: LightningStore = from_url(url, run_id=run if run is not None else DEFAULT_RUN_ID, token=token)
    if retention is not None:
        if not isinstance(store, BackendStore):
            raise ConfigError(
                f"store {hide_password(url)!r} is owned by its server, which decides what is kept; give no retention"
            )
        store.retain(retention)
    return store
