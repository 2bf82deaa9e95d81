"""Where a bundle comes from: blocks over MQTT, https, or the inbox."""
