"""What a delivery has to pass: steps with limits, one repetition, a table (`bash .ci/run`)."""
