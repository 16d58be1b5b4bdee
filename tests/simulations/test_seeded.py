"""The randomness of simulations: the same streams on every machine, and a stream for every purpose, site and round."""

from simulations.seeded import SeededRandomness


def test_golden_streams() -> None:
    """Other streams of the same seed would be another experiment under the same name."""
    one = SeededRandomness(seed=7, site=2).for_round("run", 3)
    assert [stream.bit_generator.random_raw() for stream in (one.sampling, one.noise)] == [
        7863081056509027735,
        127879605942072397,
    ]
    assert one.open_uniforms(2).round(6).tolist() == [0.796379, 0.678163]


def test_a_stream_depends_on_seed_site_round_and_purpose_alone() -> None:
    def drawn(seed: int, site: int, round_number: int, run: str = "a") -> bytes:
        return SeededRandomness(seed, site).for_round(run, round_number).standard_normal(8).tobytes()

    assert drawn(1, 2, 3) == drawn(1, 2, 3, run="b")
    assert len({drawn(1, 2, 3), drawn(2, 1, 3), drawn(1, 3, 2), drawn(3, 2, 1)}) == 4
    both = SeededRandomness(1, 2).for_round("a", 3)
    assert (both.sampling.random(8) != both.noise.random(8)).all()


def test_a_rate_of_one_takes_every_record_and_draws_nothing() -> None:
    whole, other = (SeededRandomness(1, 0).for_round("", 1) for _ in range(2))
    assert whole.poisson_sample(5, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert whole.poisson_sample(1000, 0.3).tolist() == other.poisson_sample(1000, 0.3).tolist()
    assert 250 < whole.poisson_sample(1000, 0.3).size < 350  # 300 expected, standard deviation 14


def test_seeds_of_modules_are_of_63_bits() -> None:
    seeds = {SeededRandomness(1, site).for_round("", 1).module_seed() for site in range(200)}
    assert len(seeds) == 200 and 2**62 < max(seeds) < 2**63
