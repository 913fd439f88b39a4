"""Turn a command line, a YAML file and a DeepSpeed JSON into checked Settings."""
