"""The KV cache: pages, their block ids, and the levels below the device."""
