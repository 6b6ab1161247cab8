//! The comparison: every cell that differs is told with its axes, all of them at the end.

use crate::client::{Answer, Drawn};
use std::fmt::Display;

/// Told at most; the count is exact.
const N_TOLD: usize = 20;

/// What was found so far.
#[derive(Default)]
pub(crate) struct Findings {
    n_compared: usize,
    wrong: Vec<String>,
}

impl Findings {
    /// Holds an answer against what it has to be.
    pub(crate) fn compare(
        &mut self,
        cell: &dyn Display,
        wanted: &[Drawn],
        got: &Result<Answer, String>,
    ) {
        let difference = match got {
            Ok(answer) => difference(wanted, &answer.drawn),
            Err(trouble) => Some(trouble.clone()),
        };
        self.n_compared += 1;
        if let Some(difference) = difference {
            self.wrong.push(format!("{cell}: {difference}"));
        }
    }

    /// Notes that something besides the tokens does not hold.
    pub(crate) fn expect(&mut self, cell: &dyn Display, holds: bool, otherwise: impl Display) {
        if !holds {
            self.wrong.push(format!("{cell}: {otherwise}"));
        }
    }

    pub(crate) fn n_compared(&self) -> usize {
        self.n_compared
    }

    pub(crate) fn wrong(&self) -> &[String] {
        &self.wrong
    }

    /// Ends the test.
    pub(crate) fn assert_none(&self) {
        assert!(self.n_compared > 0, "nothing was compared");
        let told = &self.wrong[..self.wrong.len().min(N_TOLD)];
        assert!(
            told.is_empty(),
            "{} findings in {} comparisons; the first of them:\n{}",
            self.wrong.len(),
            self.n_compared,
            told.join("\n")
        );
    }
}

/// The first place where two outputs part.
fn difference(wanted: &[Drawn], got: &[Drawn]) -> Option<String> {
    let parted = wanted.iter().zip(got).position(|(a, b)| a != b);
    match parted {
        Some(idx) => Some(format!(
            "output {idx} is {:?}, has to be {:?}",
            got[idx], wanted[idx]
        )),
        None if wanted.len() != got.len() => Some(format!(
            "{} tokens came, {} have to",
            got.len(),
            wanted.len()
        )),
        None => None,
    }
}
