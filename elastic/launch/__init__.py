"""Launchers: how rank processes are started. One interface (`base`); local processes now."""
