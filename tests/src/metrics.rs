//! Reads a process's gauges and counters at its admin port, as Prometheus would.

use crate::http;
use anyhow::{Context, Result, ensure};
use std::net::SocketAddr;

/// Everything that a process told at one moment.
pub struct Metrics(String);

impl Metrics {
    /// Asks the admin port.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn read(admin: SocketAddr) -> Result<Self> {
        let response = http::get(admin, "/metrics")?;
        ensure!(response.status == 200, "/metrics is {}", response.status);
        Ok(Self(response.body))
    }

    /// The text as scraped.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// The sum over all labels of a metric.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn sum(&self, name: &str) -> Result<f64> {
        self.sum_where(name, "")
    }

    /// The sum of a metric over the samples whose labels hold `label`, for example `event="retry"`.
    ///
    /// # Errors
    /// When there is none.
    pub fn sum_where(&self, name: &str, label: &str) -> Result<f64> {
        let mut values = Vec::new();
        for line in self.0.lines() {
            let Some((sample, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let (known, labels) = sample.split_once('{').unwrap_or((sample, ""));
            if known == name && labels.contains(label) {
                values.push(value.parse::<f64>().with_context(|| line.to_owned())?);
            }
        }
        ensure!(!values.is_empty(), "no metric {name} with {label:?}");
        Ok(values.iter().sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_by_name_and_label() {
        let text = "# HELP a x\na{node=\"1\"} 2\na{node=\"2\"} 3\nab 7\nb 4.5\n# EOF\n";
        let metrics = Metrics(text.to_owned());
        let sum = |name| metrics.sum(name).expect("there");
        assert_eq!((sum("a"), sum("ab"), sum("b")), (5.0, 7.0, 4.5));
        let of_one = metrics.sum_where("a", "node=\"2\"").expect("there");
        assert_eq!(of_one, 3.0);
        assert!(metrics.sum("c").is_err());
    }
}
