"""One model measured in many formats: scale x block x rule x element x activations."""
