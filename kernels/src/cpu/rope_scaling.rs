//! Rope stretched to longer contexts than a model was first trained for.
//!
//! Each rule changes the frequencies of the pairs, once, at load: linear interpolation (Chen et al. 2023), the rule of
//! Llama 3.1, and YaRN (Peng et al. 2023, <https://arxiv.org/abs/2309.00071>), which also multiplies sines and cosines.
//! Everything is computed in double precision with our own logarithm, so that every host has the same angles.

use super::real;
use super::rope::Rope;
use std::f64::consts::PI;

/// How the pairs' frequencies differ from `theta^(-2i / head_dim)`.
#[derive(Clone, PartialEq, Debug)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All are divided by this.
    Linear(f64),
    /// Slow pairs are divided, fast ones are not, and there is a ramp between.
    Llama3(Llama3Scaling),
    /// Likewise with another ramp; the magnitude changes too.
    Yarn(YarnScaling),
    /// Each pair's frequency is divided by its own number, as GGUF files of Llama 3 have it, `[head_dim / 2]`.
    Divisors(Vec<f64>),
}

/// The four numbers of Llama 3.1.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Llama3Scaling {
    /// What slow pairs are divided by.
    pub factor: f64,
    /// Pairs that turn fewer times than this within the original context are slow.
    pub low_freq_factor: f64,
    /// Pairs that turn more often than this are fast; above `low_freq_factor`.
    pub high_freq_factor: f64,
    /// Positions of the first training.
    pub original_positions: f64,
}

/// The numbers of YaRN.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct YarnScaling {
    /// What slow pairs are divided by.
    pub factor: f64,
    /// Turns within the original context from which on a pair is fast.
    pub beta_fast: f64,
    /// Turns up to which it is slow.
    pub beta_slow: f64,
    /// Positions of the first training.
    pub original_positions: f64,
    /// The ramp begins and ends at whole pairs.
    pub truncate: bool,
    /// Sines and cosines are multiplied with `magnitude * m(mscale) / m(mscale_all_dim)`, where
    /// `m(x) = 0.1 x ln(factor) + 1`.
    pub magnitude: f64,
    /// See `magnitude`; 1 in the paper.
    pub mscale: f64,
    /// See `magnitude`; 0 in the paper.
    pub mscale_all_dim: f64,
}

impl YarnScaling {
    fn whole_magnitude(&self) -> f64 {
        let m = |scale: f64| match self.factor > 1.0 {
            true => 0.1 * scale * real::ln(self.factor) + 1.0,
            false => 1.0,
        };
        self.magnitude * m(self.mscale) / m(self.mscale_all_dim)
    }
}

impl Rope {
    /// Heads of `head_dim` elements, base `theta`, frequencies changed by a rule.
    ///
    /// # Panics
    /// When `head_dim` is odd or zero, a number is not above 0, or there is not one divisor for each pair.
    pub fn scaled(head_dim: usize, theta: f64, scaling: &RopeScaling) -> Self {
        let plain = Self::new(head_dim, theta);
        let each = |change: &dyn Fn(usize, f64) -> f64| -> Vec<f64> {
            let pairs = plain.frequencies().iter().enumerate();
            pairs
                .map(|(pair, frequency)| change(pair, *frequency))
                .collect()
        };
        match scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear(factor) => {
                assert!(*factor > 0.0, "a factor is positive");
                Self::with(each(&|_, frequency| frequency / factor), 1.0)
            }
            RopeScaling::Llama3(rule) => {
                Self::with(each(&|_, frequency| llama3(rule, frequency)), 1.0)
            }
            RopeScaling::Yarn(rule) => {
                let ramp = yarn_ramp(rule, head_dim, theta);
                let blend = |pair, frequency: f64| {
                    let slow: f64 = ramp(pair);
                    frequency / rule.factor * slow + frequency * (1.0 - slow)
                };
                Self::with(each(&blend), rule.whole_magnitude())
            }
            RopeScaling::Divisors(divisors) => {
                assert_eq!(divisors.len(), head_dim / 2, "one divisor for each pair");
                Self::with(each(&|pair, frequency| frequency / divisors[pair]), 1.0)
            }
        }
    }
}

fn llama3(rule: &Llama3Scaling, frequency: f64) -> f64 {
    let n_turns = rule.original_positions * frequency / (2.0 * PI);
    if n_turns < rule.low_freq_factor {
        return frequency / rule.factor;
    }
    if n_turns > rule.high_freq_factor {
        return frequency;
    }
    let kept = (n_turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor);
    (1.0 - kept) * frequency / rule.factor + kept * frequency
}

/// For each pair how far it is slow: 0 (fast) to 1.
fn yarn_ramp(rule: &YarnScaling, head_dim: usize, theta: f64) -> impl Fn(usize) -> f64 {
    let n = head_dim as f64;
    let pair_with_turns = |n_turns: f64| {
        n * real::ln(rule.original_positions / (n_turns * 2.0 * PI)) / (2.0 * real::ln(theta))
    };
    let (mut low, mut high) = (
        pair_with_turns(rule.beta_fast),
        pair_with_turns(rule.beta_slow),
    );
    if rule.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, high) = (low.max(0.0), high.min(n - 1.0));
    let width = if low == high { 0.001 } else { high - low };
    move |pair| ((pair as f64 - low) / width).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: Llama3Scaling = Llama3Scaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: 8192.0,
    };
    const YARN: YarnScaling = YarnScaling {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_positions: 32_768.0,
        truncate: true,
        magnitude: 1.0,
        mscale: 1.0,
        mscale_all_dim: 0.0,
    };

    fn near(found: f64, wanted: f64) {
        assert!((found / wanted - 1.0).abs() < 1e-12, "{found} {wanted}");
    }

    #[test]
    fn linear_and_divisors_divide() {
        let plain = Rope::new(64, 5e5);
        let linear = Rope::scaled(64, 5e5, &RopeScaling::Linear(8.0));
        let divisors = RopeScaling::Divisors((1..=32).map(f64::from).collect());
        let divided = Rope::scaled(64, 5e5, &divisors);
        for pair in 0..32 {
            near(linear.frequencies()[pair], plain.frequencies()[pair] / 8.0);
            let wanted = plain.frequencies()[pair] / (pair + 1) as f64;
            near(divided.frequencies()[pair], wanted);
        }
        assert_eq!(linear.magnitude(), 1.0);
    }

    #[test]
    fn llama3_divides_slow_pairs_only() {
        let plain = Rope::new(128, 5e5);
        let scaled = Rope::scaled(128, 5e5, &RopeScaling::Llama3(LLAMA));
        let mut n_between = 0;
        for (found, frequency) in scaled.frequencies().iter().zip(plain.frequencies()) {
            let wavelength = 2.0 * PI / frequency;
            if wavelength < 8192.0 / 4.0 {
                near(*found, *frequency);
            } else if wavelength > 8192.0 {
                near(*found, frequency / 8.0);
            } else {
                n_between += 1;
                let smooth = (8192.0 / wavelength - 1.0) / 3.0;
                near(
                    *found,
                    (1.0 - smooth) * frequency / 8.0 + smooth * frequency,
                );
            }
        }
        assert!(n_between > 0);
    }

    #[test]
    fn yarn_keeps_fast_pairs_divides_slow_ones_and_raises_the_magnitude() {
        let plain = Rope::new(128, 1e6);
        let scaled = Rope::scaled(128, 1e6, &RopeScaling::Yarn(YARN));
        let at =
            |n_turns: f64| 128.0 * (32_768.0 / (n_turns * 2.0 * PI)).ln() / (2.0 * 1e6_f64.ln());
        let (low, high) = (at(32.0).floor(), at(1.0).ceil());
        for pair in 0..64 {
            let slow = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            let frequency = plain.frequencies()[pair];
            near(
                scaled.frequencies()[pair],
                frequency / 4.0 * slow + frequency * (1.0 - slow),
            );
        }
        near(scaled.frequencies()[0], 1.0);
        near(scaled.frequencies()[63], plain.frequencies()[63] / 4.0);
        near(scaled.magnitude(), 1.138_629_436_111_989);
        let given = YarnScaling {
            magnitude: 1.25,
            mscale: 0.707,
            mscale_all_dim: 0.707,
            ..YARN
        };
        near(given.whole_magnitude(), 1.25);
    }

    #[test]
    fn a_ramp_of_no_width_is_a_step() {
        let rule = YarnScaling {
            beta_fast: 1.0,
            truncate: false,
            ..YARN
        };
        let scaled = Rope::scaled(128, 1e6, &RopeScaling::Yarn(rule));
        assert!(
            scaled
                .frequencies()
                .iter()
                .all(|f| f.is_finite() && *f > 0.0)
        );
    }
}
