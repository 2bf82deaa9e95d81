"""Sources of bundles: blocks over MQTT, or https; what arrives goes into the store."""
