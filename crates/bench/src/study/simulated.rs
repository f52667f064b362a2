//! Simulated studies of known truth: advice, findings and the best variants are right in at least 95 of 100 studies.

use super::advice::{compared, compared_in_cases};
use super::tests::{Plain, run};
use super::verdict::MATTERS;
use super::{Report, Variant, Verdict};

/// A study of known truth.
struct Truth {
    /// Factors of the IOPS of the variants.
    factors: Vec<f64>,
    /// Relative noise of a run.
    noise: f64,
    /// Every tenth run is three times slower.
    is_heavy: bool,
    turns: u32,
    /// Number of simulated studies in the test suite.
    draws: usize,
    /// Nearly every study must have a recommendation.
    is_decided: bool,
}

const CASES: [&str; 2] = ["a", "b"];

/// Returns `count` variants: three transports with numbers of threads, or two variants that differ in the transport.
fn variants(count: usize) -> Vec<Variant> {
    let variant = |transport: &str, threads: usize| Variant {
        name: format!("{transport}, {threads}"),
        settings: vec![
            ("transport", transport.to_owned()),
            ("threads", threads.to_string()),
        ],
    };
    let transports = if count > 4 { 3 } else { 2 };
    (0..count)
        .map(|at| {
            variant(
                ["blk", "scsi", "luns"][at % transports],
                at / transports + 1,
            )
        })
        .collect()
}

impl Truth {
    fn draw(&self, variants: &[Variant], random: &mut fastrand::Rng) -> Vec<Plain> {
        let mut runs = Vec::new();
        for turn in 0..self.turns {
            // All variants drift together.
            let drift = 1.0 + random.f64();
            for case in CASES {
                for (variant, factor) in variants.iter().zip(&self.factors) {
                    let normal: f64 = (0..12).map(|_| random.f64()).sum::<f64>() - 6.0;
                    let slow = match self.is_heavy && random.u8(0..10) == 0 {
                        true => 1.0 / 3.0,
                        false => 1.0,
                    };
                    let iops = 10_000.0 * factor * drift * slow * (normal * self.noise).exp();
                    runs.push(run(&variant.name, case, turn, iops));
                }
            }
        }
        runs
    }

    /// Returns true if a conclusion about two factors contradicts the truth.
    fn is_wrong(verdict: Verdict, one: f64, other: f64) -> bool {
        let ratio = one / other;
        match verdict {
            Verdict::More => ratio <= 1.0,
            Verdict::Less => ratio >= 1.0,
            // 3 % apart is the smallest difference that matters.
            Verdict::Equal => (ratio - 1.0).abs() >= MATTERS - 1e-9,
            Verdict::Undecided(_) => false,
        }
    }

    /// Returns the factor of the first variant with this property.
    fn factor(&self, variants: &[Variant], is_it: impl Fn(&Variant) -> bool) -> f64 {
        self.factors[variants.iter().position(is_it).unwrap()]
    }

    /// Returns true if the variant is not the only one with the most IOPS.
    fn is_no_winner(&self, variants: &[Variant], name: &str) -> bool {
        let most = self.factors.iter().copied().fold(0.0, f64::max);
        let winners = self.factors.iter().filter(|factor| **factor == most);
        winners.count() > 1 || self.factor(variants, |variant| variant.name == name) != most
    }

    /// Returns true if a sentence of the advice contradicts the truth.
    fn is_advice_wrong(&self, report: &Report<'_, Plain>, variants: &[Variant]) -> bool {
        let is_false = compared(report)
            .iter()
            .any(|(setting, value, best, comparison)| {
                let of = |value: &str| {
                    self.factor(variants, |variant| variant.setting(setting) == Some(value))
                };
                Truth::is_wrong(comparison.verdict(), of(value), of(best))
            });
        let last = report.recommend().unwrap();
        let winner = last
            .strip_suffix(": it has the most IOPS over all cases")
            .and_then(|winner| winner.strip_prefix("take: "));
        is_false || winner.is_some_and(|name| self.is_no_winner(variants, name))
    }

    /// Returns true if a finding of a case contradicts the truth.
    fn is_finding_wrong(&self, report: &Report<'_, Plain>, variants: &[Variant]) -> bool {
        let of = |name: &str| self.factor(variants, |variant| variant.name == name);
        let found = compared_in_cases(report);
        found.iter().any(|(_, one, other, found)| {
            Truth::is_wrong(found.unwrap().verdict(), of(one), of(other))
        })
    }

    /// Returns true if the best variant of a case, or one that is equal to it, contradicts the truth.
    fn is_best_wrong(&self, report: &Report<'_, Plain>, variants: &[Variant]) -> bool {
        let of = |name: &str| self.factor(variants, |variant| variant.name == name);
        CASES.iter().any(|case| {
            let (best, others) = report.rivals_in(case).unwrap();
            let is_winner = others.iter().all(|(_, verdict)| *verdict == Verdict::More);
            let mut equal = others
                .iter()
                .filter(|(_, verdict)| *verdict == Verdict::Equal);
            (is_winner && self.is_no_winner(variants, &best.name))
                || equal.any(|(other, verdict)| {
                    Truth::is_wrong(*verdict, of(&best.name), of(&other.name))
                })
        })
    }

    /// Draws studies, and checks that few of them are wrong and enough are decided.
    fn check(&self, draws: usize, random: &mut fastrand::Rng) -> String {
        let variants = variants(self.factors.len());
        let mut wrong = [0; 3];
        let mut decided = 0;
        for _ in 0..draws {
            let runs = self.draw(&variants, random);
            let report = Report {
                runs: &runs,
                variants: variants.iter().collect(),
                cases: CASES.map(str::to_owned).to_vec(),
                notes: Vec::new(),
            };
            wrong[0] += usize::from(self.is_advice_wrong(&report, &variants));
            wrong[1] += usize::from(self.is_finding_wrong(&report, &variants));
            wrong[2] += usize::from(self.is_best_wrong(&report, &variants));
            decided += usize::from(report.recommend().unwrap().starts_with("take: "));
        }
        let [advice, findings, best] = wrong;
        let found = format!(
            "{} variants {:?}, noise {}, heavy {}, {} turns: wrong advice {advice}, findings {findings}, best {best}; {decided} decided",
            self.factors.len(),
            &self.factors[..2],
            self.noise,
            self.is_heavy,
            self.turns
        );
        assert!(
            wrong.iter().all(|wrong| *wrong <= draws / 20),
            "of {draws}: {found}"
        );
        assert!(
            !self.is_decided || decided >= draws * 19 / 20,
            "of {draws}: {found}"
        );
        found
    }
}

/// Number of simulated studies of each truth, instead of the small numbers that the test suite has time for.
const DRAWS: &str = "LUNETTE_ADVICE_DRAWS";

#[test]
fn advice_is_right_in_95_of_100_studies_of_known_truth() {
    let more = std::env::var(DRAWS).ok();
    let more: Option<usize> = more.map(|draws| draws.parse().unwrap());
    let mut random = fastrand::Rng::with_seed(62);
    let equal = |count: usize| vec![1.0; count];
    // The second half has more IOPS.
    let halves = |count: usize, more: f64| {
        let factor = |at| if at < count / 2 { 1.0 } else { more };
        (0..count).map(factor).collect::<Vec<f64>>()
    };
    for (factors, noise, is_heavy, turns, draws, is_decided) in [
        (equal(2), 0.05, false, 4, 300, false),
        (halves(2, 1.03), 0.03, false, 4, 300, false),
        (halves(2, 1.2), 0.02, false, 4, 300, true),
        (equal(2), 0.2, true, 5, 300, false),
        (equal(2), 0.004, false, 6, 100, true),
        (halves(2, 1.03), 0.004, false, 6, 100, true),
        (halves(2, 1.03), 0.05, true, 8, 100, false),
        (halves(2, 0.8), 0.1, false, 20, 100, true),
        (halves(2, 1.2), 0.3, true, 5, 100, false),
        (equal(4), 0.05, false, 4, 100, false),
        (vec![1.0, 0.8, 1.03, 0.824], 0.05, false, 8, 100, false),
        (equal(12), 0.05, false, 4, 40, false),
        (equal(12), 0.2, true, 5, 20, false),
        (halves(12, 1.03), 0.01, false, 8, 20, false),
        (halves(12, 1.2), 0.1, false, 8, 20, false),
    ] {
        let truth = Truth {
            factors,
            noise,
            is_heavy,
            turns,
            draws,
            is_decided,
        };
        let found = truth.check(more.unwrap_or(truth.draws), &mut random);
        if more.is_some() {
            cli_common::print_line(&found);
        }
    }
}
