"""Single-device networks that know no ranks; beside each, its table of shardings as data."""
