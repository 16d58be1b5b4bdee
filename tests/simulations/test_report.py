"""The report: nothing invented, nothing hidden, nothing from the log taken for markup."""

import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import RunFolderError
from server.runlog import RunLog
from simulations.report import load_run, write_report
from tests.run_logs import end_event, finished_run, public_run, round_event, start_event, write_log
from tests.simulations.golden_pages import GOLDEN, pages
from tests.simulations.report_pages import Page, answers_of, cells_of, charts_of, report_page

_EVIL = '<script>alert("x")</script>&</title>'


def test_headline_and_tiles_say_accuracy_privacy_and_bytes(tmp_path: Path) -> None:
    page = report_page(tmp_path, finished_run(tmp_path / "run"))
    words = page.text()
    assert "77.4 % test accuracy at (epsilon 6.00, delta" in words
    assert "per record; uplink 16.8 kB, 2x less than dense" in words
    assert "of 7.00 planned, delta 1e-05" in words
    assert "1.01x more than dense (32 kB)" in words  # downlink
    assert "each record of each site, against everyone who sees the uploads of that site, including the server" in words
    assert "rdp (Rényi differential privacy)" in words and "noise multiplier 1.127" in words
    assert "not private" not in words.lower()
    assert "unfinished" not in words


@pytest.mark.parametrize("name", ["run", "clients", "numbers", "compared", "drawings"])
def test_pages_are_as_they_were(name: str) -> None:
    """A change that is meant: ``make golden-pages``, and look at what it changed."""
    assert pages()[name].splitlines() == (GOLDEN / f"{name}.html").read_text(encoding="utf-8").splitlines()


def test_a_page_may_be_written_into_a_new_folder_and_over_an_old_one(tmp_path: Path) -> None:
    folder, page = finished_run(tmp_path / "run"), tmp_path / "a" / "new" / "page.html"
    for _ in range(2):
        assert write_report([folder], page) == page and page.exists()


def test_page_is_self_contained_and_each_chart_has_words(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    html = write_report([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert not re.search(r"https?://|//\w|@import|url\(", html)
    assert {"script", "link", "img", "iframe"}.isdisjoint(tag for tag, _ in page.elements)
    policies = [attrs["content"] or "" for _, attrs in page.elements if attrs.get("http-equiv")]
    assert len(policies) == 1 and policies[0].startswith("default-src 'none'"), "browsers enforce it too"
    assert "script-src" not in policies[0] and "connect-src" not in policies[0]
    charts = [attrs for tag, attrs in page.elements if tag == "svg"]
    assert len(charts) == 6
    for attrs in charts:
        assert attrs["role"] == "img"
        assert re.search(r"first .*\d.*, last .*\d.*, highest .*\d", attrs["aria-label"] or "")


def test_a_stranger_learns_what_was_private_how_much_for_whom_and_at_what_cost(tmp_path: Path) -> None:
    answers = answers_of(tmp_path, finished_run(tmp_path / "run", config={"model": "net", "dataset": "pictures"}))
    assert answers["What ran"].startswith(
        "2 sites that declare 40 to 120 records each (160 in all) trained one model together (model net, "
    )
    assert answers["What ran"].endswith("4 rounds in 10 s.")
    assert answers["What was private"].startswith("each training record of each site")
    assert answers["At which epsilon"].startswith("(epsilon 6.00, delta 1 in 100,000) per record, over all")
    assert "by a factor of at most 404," in answers["At which epsilon"], "e^6 = 403.4"
    assert answers["For whom"].startswith(
        "each record of each site, against everyone who sees the uploads of that site"
    )
    assert "that a site takes part; how many records it declares" in answers["What was not"]
    assert "16.8 kB up and 32.4 kB down for all sites and rounds together" in answers["What it cost"]
    assert "2.1 kB up and 4.05 kB down for one site in one round" in answers["What it cost"]
    assert "2x less than dense up and 1.01x more than dense down" in answers["What it cost"]


def test_a_simulation_is_told_from_a_deployment_and_from_an_old_log_that_does_not_say(tmp_path: Path) -> None:
    def what(**changes: Any) -> dict[str, str]:
        return answers_of(
            tmp_path, finished_run(tmp_path / str(len(changes)) / str(changes.get("seeded_noise")), **changes)
        )

    simulated, deployed = what(seeded_noise=True), what(seeded_noise=False)
    assert simulated["What ran"].startswith("A simulation: ") and "take the noise away" in simulated["What was not"]
    assert not deployed["What ran"].startswith("A sim") and "drawn in secret and is kept" in deployed["What was not"]
    start = start_event()
    for key in ("seeded_noise", "declared_sizes"):
        del start[key]
    old = answers_of(tmp_path, write_log(tmp_path / "old", start, [round_event(1)], end_event(1)))
    assert "if these sites were simulated" in old["What was not"] and "records each" not in old["What ran"]


def test_pages_of_several_client_level_runs_ask_to_be_kept_secret_too(tmp_path: Path) -> None:
    runs = [
        finished_run(
            tmp_path / name,
            name=name,
            privacy_unit="client",
            seeded_noise=True,
            config={"cohort": 10, "clip-norm": 0.5},
        )
        for name in ("one", "two")
    ]
    for folders in (runs[:1], runs):
        words = report_page(tmp_path, *folders).text()
        assert "keep them with the server" in words and "from the seed: a simulation" in words
        assert (
            "4 rounds, each with about 10 sites drawn in secret of 2; the sum of their movements: clip norm 0.5"
            in words
        )
    assert "deployed, the server draws it in secret" in report_page(tmp_path, runs[0]).text()


def test_what_was_accounted_is_the_methods_own_charge(tmp_path: Path) -> None:
    config = {"steps-per-round": 3, "sampling-rate": 0.1, "clip-norm": 2.0}
    for method, charge in (("random", "sampled Gaussian"), ("compressive", "Laplace, pure epsilon")):
        folder = finished_run(tmp_path / method, config={**config, "method": method})
        words = report_page(tmp_path, folder).text("dd")
        assert f"{charge}; 3 steps for each round that a site was asked in" in words
        assert "a record is in with a chance of 0.1; clip norm 2.0, noise multiplier 1.127" in words


@pytest.mark.parametrize(
    ("epsilon", "judgement"),
    [
        (1.0, "a strong promise:"),
        (1.01, "a fair promise:"),
        (3.0, "a fair promise:"),
        (3.01, "a weak promise:"),
        (10.0, "a weak promise:"),
        (10.01, "so weak a promise that we would not call it private:"),
    ],
)
def test_an_epsilon_is_judged_as_the_how_to_says(tmp_path: Path, epsilon: float, judgement: str) -> None:
    folder = write_log(tmp_path / "run", start_event(), [round_event(1)], end_event(1, epsilon=epsilon))
    assert f"That is {judgement}" in answers_of(tmp_path, folder)["At which epsilon"]


def test_dense_prices_of_several_runs_name_all_runs_that_share_them(tmp_path: Path) -> None:
    def run(name: str, price: int) -> Path:
        rounds = [round_event(n, dense_uplink=price) for n in (1, 2)]
        return write_log(tmp_path / name, start_event(name=name), rounds, end_event(2))

    chart = charts_of(tmp_path, run("a", 8400), run("b", 8400), run("c", 6000))["Uplink per round"]
    assert chart.count('class="level c') == 2
    for colour, label in ((1, "a, b"), (3, "c")):
        assert f'<li class="c{colour} dashed">dense, 4 bytes per parameter: {label}</li>' in chart


@pytest.mark.parametrize(
    ("epsilon", "factor"),
    [
        (0.5, "at most 1.65,"),
        (3.0, "at most 20.09,"),
        (3.001, "at most 21,"),
        (8.0, "is a weak promise"),
        (12.0, "we would not call it private"),
        (20.0, "at most 485,165,196,"),
        (20.001, "at most e^20.01,"),
    ],
)
def test_epsilon_is_read_as_odds_and_never_too_small(tmp_path: Path, epsilon: float, factor: str) -> None:
    folder = write_log(tmp_path / "run", start_event(), [round_event(1)], end_event(1, epsilon=epsilon))
    assert factor in answers_of(tmp_path, folder)["At which epsilon"]


def test_plain_words_name_the_unit_and_the_cohort(tmp_path: Path) -> None:
    rounds = [round_event(1, cohort=["a"], admitted=1), round_event(2)]
    by_client = answers_of(
        tmp_path, write_log(tmp_path / "run", start_event(privacy_unit="client"), rounds, end_event(2))
    )
    assert by_client["What was private"].startswith("each whole site: whether it took part at all")
    assert "the server is trusted" in by_client["For whom"]
    assert "that a site takes part" not in by_client["What was not"]
    assert "without noise" in by_client["What was not"] and "keep them with the server" in by_client["Keep secret"]
    assert "sees all models of the run and bets on whether one given site was" in by_client["At which epsilon"]
    assert "1.5 of the sites asked in each on average" in by_client["What ran"]
    public = answers_of(tmp_path, public_run(tmp_path / "public"))
    assert public["What was private"].startswith("nothing: no clipping, no noise.")
    assert "At which epsilon" not in public and "For whom" not in public


def test_bytes_are_split_by_part_in_both_directions(tmp_path: Path) -> None:
    one = finished_run(tmp_path / "run")
    cells = cells_of(tmp_path, "Where the bytes went", one)
    rows = {row[0]: row[2:] for row in zip(*(cells[column::6] for column in range(6)), strict=True)}
    assert rows == {
        "values": ("16 kB", "95.2 %", "32 kB", "98.8 %"),
        "index": ("400 B", "2.4 %", "0 B", "0.0 %"),
        "header": ("160 B", "1.0 %", "160 B", "0.5 %"),
        "framing": ("240 B", "1.4 %", "240 B", "0.7 %"),
        "total": ("16.8 kB", "100.0 %", "32.4 kB", "100.0 %"),
        "dense": ("33.6 kB", "200.0 %", "32 kB", "98.8 %"),
    }
    two = finished_run(tmp_path / "two", rounds=1, name="short")
    compared = cells_of(tmp_path, "Where the bytes went", one, two)
    assert compared[:7] == ["cooling", "uplink", "16 kB", "400 B", "160 B", "240 B", "16.8 kB"]
    assert compared[21:] == ["short", "downlink", "8 kB", "0 B", "40 B", "60 B", "8.1 kB"]


def test_a_dense_price_far_above_the_bars_is_told_not_drawn(tmp_path: Path) -> None:
    rounds = [round_event(number, dense_uplink=42_000) for number in (1, 2)]
    chart = charts_of(tmp_path, write_log(tmp_path / "run", start_event(), rounds, end_event(2)))["Uplink per round"]
    assert 'class="level c0"' not in chart and "Dashed" not in chart
    assert "would be 42 kB a round: 10 times the height of this chart" in chart
    for price, drawn in ((12_600, True), (12_601, False)):
        rounds = [round_event(1, dense_uplink=price)]
        folder = write_log(tmp_path / str(price), start_event(), rounds, end_event(1))
        assert ('class="level c0"' in charts_of(tmp_path, folder)["Uplink per round"]) == drawn, (
            "three times is the most"
        )


def test_density_tells_the_mask_schedule(tmp_path: Path) -> None:
    kept = [1000, 1000, 600, 600]
    rounds = [round_event(n + 1, epoch=n // 2, kept=k, density=k / 1000) for n, k in enumerate(kept)]
    chart = charts_of(tmp_path, write_log(tmp_path / "run", start_event(), rounds, end_event(4)))[
        "Density and mask schedule"
    ]
    assert "A new mask every 2 rounds: from 1,000 of 1,000 parameters to 600." in chart
    assert "60.0 % in round 3 (600 of 1,000 kept, mask 2)" in chart
    assert re.search(r'class="line" d="M[\d.]+ [\d.]+H', chart), "steps: a mask stays for an epoch"


def test_every_round_is_in_a_table_too(tmp_path: Path) -> None:
    html = write_report([finished_run(tmp_path / "run")], tmp_path / "report.html").read_text(encoding="utf-8")
    table = re.search(r"<summary>Round by round</summary>(.*?)</details>", html, re.S)
    assert table is not None
    cells = re.findall(r"<td[^>]*>(.*?)</td>", table[1])
    assert len(cells) == 4 * 10
    assert cells[:10] == ["1", "51.0 %", "1.50", "50.0 %", "500", "1", "2 of 2", "4.2 kB", "8.1 kB", "2.5 s"]


def test_sites_that_are_asked_no_more_are_named_with_the_reason(tmp_path: Path) -> None:
    end = end_event(1)
    end["sites"][1]["dropped"] = "refused: its budget is spent"
    page = report_page(tmp_path, write_log(tmp_path / "run", start_event(), [round_event(1)], end))
    assert "Asked no more:" in page.text("p") and "b refused: its budget is spent" in page.text("td")


@pytest.mark.parametrize("rounds", [1, 4, 70])
def test_every_round_is_one_point_in_each_chart(tmp_path: Path, rounds: int) -> None:
    charts = charts_of(tmp_path, finished_run(tmp_path / "run", rounds))
    for title in ("Test accuracy", "Accuracy for the bytes", "Epsilon spent", "Density and mask schedule"):
        assert charts[title].count('class="point"') == rounds, title
    for title in ("Uplink per round", "Downlink per round"):
        assert charts[title].count('class="bar"') == rounds, title
        assert charts[title].count('class="level c0"') == 1, "the dense price"
    assert (
        "round 1: 4.2 kB (values 4 kB, index 100 B, header 40 B, framing 60 B; dense 8.4 kB)"
        in charts["Uplink per round"]
    )
    assert "planned 7.00" in charts["Epsilon spent"]
    assert not re.search(r"\b(nan|inf)\b", "".join(charts.values()))


def test_rounds_without_evaluation_are_gaps_not_zeros(tmp_path: Path) -> None:
    rounds = [
        round_event(1),
        round_event(2, accuracy=None),
        round_event(3, accuracy=float("nan")),
        round_event(4),
        round_event(5),
    ]
    folder = write_log(tmp_path / "run", start_event(), rounds, end_event(5))
    assert [one.accuracy for one in load_run(folder).rounds] == [0.51, None, None, 0.54, 0.55]
    chart = charts_of(tmp_path, folder)["Test accuracy"]
    assert chart.count('class="point"') == 3
    assert re.search(r'class="line" d="M[^M]*"', chart), "one solid piece, from round 4 to round 5"
    assert re.search(r'class="bridge" d="M[^M]*"', chart), "one dotted piece, from round 1 to round 4"
    assert "0.0 %" not in chart.replace("10.0 %", "")


def test_a_run_without_rounds_has_a_report(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", start_event(initial_accuracy=None), [], None)
    page = report_page(tmp_path, folder)
    words = page.text()
    assert "No accuracy measured" in words and "nothing uploaded yet" in words and "epsilon 0.00" in words
    assert words.count("Nothing measured yet") == 6
    assert page.count("circle") == 0


def test_a_missing_epsilon_of_a_private_run_is_not_shown_as_zero(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", start_event(), [round_event(1, epsilon=None)], None)
    words = report_page(tmp_path, folder).text()
    assert "epsilon unknown" in words and "epsilon 0.00" not in words


def test_printed_epsilon_is_never_below_the_spent_one(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", start_event(), [round_event(1)], end_event(1, epsilon=5.9901))
    assert "(epsilon 6.00," in report_page(tmp_path, folder).text()
    exact = write_log(tmp_path / "exact", start_event(), [round_event(1)], end_event(1, epsilon=5.99))
    assert "(epsilon 5.99," in report_page(tmp_path, exact).text()


def test_text_from_the_log_is_never_markup(tmp_path: Path) -> None:
    rejections = [{"site": _EVIL, "reason": _EVIL + "\ud800"}]
    start = start_event(
        name=_EVIL, privacy_unit=_EVIL, neighbours=_EVIL, accountant=_EVIL, version=_EVIL, config={_EVIL: _EVIL}
    )
    end = end_event(2)
    end["sites"][0]["site"] = _EVIL
    evil = write_log(tmp_path / "evil", start, [round_event(1, rejections=rejections), round_event(2)], end)
    for folders in ([evil], [evil, finished_run(tmp_path / "run")]):
        page = report_page(tmp_path, *folders)
        assert page.count("script") == 0
        assert page.text().count(_EVIL) >= 5, "shown as text"
    assert any(_EVIL in text for tag, text in page.texts if tag == "td")


def test_a_run_that_is_not_private_says_so_everywhere(tmp_path: Path) -> None:
    page = report_page(tmp_path, public_run(tmp_path / "run"))
    titles = [text for tag, text in page.texts if tag == "title"]
    assert "not private" in titles[0]
    assert "Not private: 77.4 % test accuracy without any privacy" in page.text("p")
    assert "This run is not private." in page.text("strong")
    badges = [text for tag, text in page.texts if tag == "span" and text == "not private"]
    assert len(badges) == 1 + page.count("div", "tile") + page.count("figure") == 1 + 6 + 6
    assert all("(not private)" in (attrs["aria-label"] or "") for tag, attrs in page.elements if tag == "svg")
    assert "Who is protected" not in page.text()
    assert "Nothing measured, not private" in page.text("text")


def test_unclear_privacy_counts_as_not_private(tmp_path: Path) -> None:
    assert not load_run(finished_run(tmp_path / "run", private="false")).private


def test_an_unfinished_run_is_summed_up_from_its_rounds(tmp_path: Path) -> None:
    rounds = [round_event(1, loss=0.9), round_event(2, accuracy=None, loss=None, density=0.2)]
    folder = write_log(tmp_path / "run", start_event(), rounds, None)
    with (folder / "run.jsonl").open("ab") as file:
        file.write(b'{"event":"round","rou')  # killed while writing
    run = load_run(folder)
    assert not run.finished
    assert (run.accuracy, run.epsilon, run.uplink, run.dense_uplink, run.seconds) == (0.51, 3.0, 8400, 16800, 5.0)
    assert run.loss == 0.9
    assert run.total_density == pytest.approx(0.35)
    page = report_page(tmp_path, folder)
    words = page.text()
    assert "so far (unfinished, 2 of 4 rounds)" in words
    sites = page.text("td")
    assert "a 120 at most 3.00 4.2 kB 8.1 kB 2 0 b 40 at most 3.00 4.2 kB 8.1 kB 2 0" in sites, "from the rounds"


def test_sites_of_an_unfinished_run_are_added_up_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    rows = [[site, 1, 2, 3, 4, 50, 60, 70, 80] for site in ("10", "9", "11")]
    rounds = [
        round_event(1, sites=rows, rejections=[{"site": "9", "reason": "late"}]),
        round_event(2, sites=rows[:2]),
    ]
    sites = load_run(write_log(tmp_path / "run", start_event(), rounds, None)).site_summaries
    assert [(one.site, one.uplink, one.downlink, one.admitted, one.rejected) for one in sites] == [
        ("9", 20, 520, 1, 1),
        ("10", 20, 520, 2, 0),
        ("11", 10, 260, 1, 0),
    ]


def test_total_density_of_an_unfinished_run_is_the_plain_mean_over_its_rounds(tmp_path: Path) -> None:
    # Weighted by replies it would be 0.84, by uploaded bytes 0.98, without the abandoned round 0.6.
    bulky = {"index": 0, "values": 400_000, "header": 40, "framing": 60}
    rounds = [
        round_event(1, density=1.0, admitted=8, uplink=bulky, seconds=60.0),
        round_event(2, density=0.2, admitted=2),
        round_event(3, density=0.3, admitted=0, abandoned=True),
    ]
    run = load_run(write_log(tmp_path / "run", start_event(), rounds, None))
    assert run.total_density == pytest.approx((1.0 + 0.2 + 0.3) / 3)


def test_an_end_before_a_resume_is_not_the_end(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", start_event(), [round_event(1)], end_event(1))
    log = RunLog(folder / "run.jsonl")
    log.write("resume", round=2, time=1.0)
    log.write("round", **round_event(2))
    log.close()
    run = load_run(folder)
    assert (run.finished, run.resumed, len(run.rounds)) == (False, 1, 2)


def test_totals_may_come_split_by_part(tmp_path: Path) -> None:
    split = {"index": 1, "values": 2, "header": 3, "framing": 4}
    assert (
        load_run(write_log(tmp_path / "run", start_event(), [round_event(1)], end_event(1, uplink=split))).uplink == 10
    )


def test_rejections_and_abandoned_rounds_are_listed_and_marked(tmp_path: Path) -> None:
    late = [{"site": "b", "reason": "no reply within 600 s"}]
    rounds = [round_event(1), round_event(2, rejections=late, abandoned=True, admitted=0), round_event(3)]
    folder = write_log(tmp_path / "run", start_event(), rounds, end_event(3))
    page = report_page(tmp_path, folder)
    assert "2 all round abandoned: too few replies, model unchanged 2 b no reply within 600 s" in page.text("td")
    assert "round 2 was abandoned" in page.text("title")
    assert "abandoned" not in report_page(tmp_path, finished_run(tmp_path / "calm")).text().replace(
        "no round was abandoned", ""
    )


@pytest.mark.parametrize(("sites", "shown", "note"), [(200, 200, None), (203, 200, "And 3 more sites.")])
def test_long_site_tables_are_cut_and_say_so(tmp_path: Path, sites: int, shown: int, note: str | None) -> None:
    rows = [{**end_event(1)["sites"][0], "site": f"hospital-{number}"} for number in range(sites)]
    words = report_page(
        tmp_path, write_log(tmp_path / "run", start_event(), [round_event(1)], end_event(1, sites=rows))
    ).text()
    assert words.count("hospital-") == shown
    assert ("more sites" in words) == (note is not None)
    assert note is None or note in words


@pytest.mark.parametrize("more", [0, 1])
def test_long_tables_of_rounds_and_rejections_are_cut_and_say_so(tmp_path: Path, more: int) -> None:
    late = {"site": "b", "reason": "x" * 300 + "y" * more}
    rounds = [round_event(1, rejections=[late] * (200 + more)), *(round_event(2 + n) for n in range(499 + more))]
    text = report_page(tmp_path, write_log(tmp_path / "run", start_event(), rounds, end_event(1))).text("p")
    assert ("And 1 more rounds before these." in text, "And 1 more rows." in text) == (more == 1, more == 1)
    reasons = cells_of(tmp_path, "Rejections", tmp_path / "run")[2::3]
    assert reasons == ["x" * 300 + (" ..." if more else "")] * 200


def test_what_a_run_cost_that_sent_nothing(tmp_path: Path) -> None:
    for name, (changes, uplink) in {"none": ({}, 0), "nobody": ({"cohort": []}, 4200)}.items():
        end = end_event(1, uplink=uplink)
        answers = answers_of(tmp_path, write_log(tmp_path / name, start_event(), [round_event(1, **changes)], end))
        assert answers["What it cost"] == "nothing uploaded yet." and " 1 round in 10 s" in answers["What ran"]


def test_comparison_shows_what_differs_and_only_that(tmp_path: Path) -> None:
    one = finished_run(tmp_path / "one")
    two = finished_run(tmp_path / "two", rounds=3, name="dense", config={"final-density": 1.0, "extra": True})
    html = write_report([one, two], tmp_path / "report.html").read_text(encoding="utf-8")
    section = re.search(r"What differs in the configuration</h2>(.*?)</section>", html, re.S)
    assert section is not None
    cells = re.findall(r"<td[^>]*>(.*?)</td>", section[1])
    assert cells == ["final-density", "0.3", "1.0", "extra", "\N{EN DASH}", "true"]
    page = Page(html)
    assert page.count("tr", "swatch c1") == page.count("tr", "swatch c2") == 1
    for title, figure in charts_of(tmp_path, one, two).items():
        assert figure.count('class="point"') == 4 + 3, title
        assert figure.count('class="series') == 2, title


def test_comparison_labels_the_runs_that_are_not_private(tmp_path: Path) -> None:
    page = report_page(tmp_path, finished_run(tmp_path / "one"), public_run(tmp_path / "two"))
    assert "2 runs compared (1 of 2 not private)" in page.text("title")
    assert page.text().count("1 of 2 not private") >= 1 + 1 + 6
    assert "highest accuracy without privacy: open (not private), 77.4 %" in page.text("p")
    assert page.text("li").count("open (not private)") == 6
    assert "Not private: open." in page.text("strong")


def test_where_targets_are_numbers_the_loss_speaks_in_tables_and_headlines(tmp_path: Path) -> None:
    def loss_run(name: str, losses: tuple[float, float]) -> Path:
        start = start_event(name=name, initial_accuracy=None, initial_loss=9.0)
        rounds = [round_event(n, accuracy=None, loss=loss) for n, loss in enumerate(losses, start=1)]
        return write_log(tmp_path / name, start, rounds, end_event(2, accuracy=None, loss=losses[-1]))

    coarse, fine = loss_run("coarse", (4.0, 2.5)), loss_run("fine", (3.0, 1.25))
    page = report_page(tmp_path, coarse, fine)
    assert "Lowest test loss with privacy: fine, 1.25 at (epsilon 6.00," in page.text("p")
    assert "accuracy" not in page.text("th")
    assert cells_of(tmp_path, "The runs side by side", coarse, fine)[:4] == [
        "coarse",
        "2 rounds",
        "2.5",
        "6.00 of 7.00",
    ]
    assert "1 4 1.50" in report_page(tmp_path, coarse).text("td"), "round by round"
    assert set(charts_of(tmp_path, coarse, fine)) >= {"Test loss", "Epsilon spent"}
    mixed = cells_of(tmp_path, "The runs side by side", coarse, finished_run(tmp_path / "pictures"))
    assert mixed[2:4] == ["\N{EN DASH}", "2.5"] and mixed[14:16] == ["77.4 %", "0.6"]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    words = report_page(tmp_path, finished_run(tmp_path / "one"), finished_run(tmp_path / "two")).text("td")
    assert f"cooling in {tmp_path / 'one'}" in words and f"cooling in {tmp_path / 'two'}" in words


def test_a_run_without_a_name_is_called_after_its_folder(tmp_path: Path) -> None:
    assert load_run(finished_run(tmp_path / "nameless", name="")).name == "nameless"


def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"has no run\.jsonl: expected the folder of a run"):
        load_run(tmp_path)
    with pytest.raises(RunFolderError, match="no 'run' event"):
        load_run(write_log(tmp_path / "headless", None, [round_event(1)], None))
    with pytest.raises(RunFolderError, match="at least one run folder"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "damage",
    [{"accuracy": "high"}, {"uplink": {"values": 1}}, {"rejections": None}, {"rejections": [1]}, {"sites": [["a", 1]]}],
)
def test_events_that_break_the_schema_are_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    with pytest.raises(RunFolderError, match="does not follow the schema"):
        load_run(write_log(tmp_path / "run", start_event(), [round_event(1, **damage)], None))
