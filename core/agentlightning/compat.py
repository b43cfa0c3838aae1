"""Names of Agent Lightning 0.3, which are available once this module is imported; docs/migration.md lists them."""

from agentlightning.errors import PluginImportError, install_command
from agentlightning.plugin.registry import get_manager

try:
    install = get_manager().get_target("agentlightning_plugins.legacy.compat:install")
except PluginImportError as error:
    command = install_command("")
    raise PluginImportError(
        f"agentlightning.compat needs the plugin legacy, which does not load ({error}). Install it with: {command}"
    ) from error
install()
