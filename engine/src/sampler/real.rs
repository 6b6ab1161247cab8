//! exp and ln in f64 that give the same bits on every machine: only additions, multiplications and divisions, which
//! IEEE 754 rounds in one way, in a written order. Accurate to about one unit in the last place, which is far
//! below what an f32 logit carries.

/// ln 2 in two parts; the first has its low bits zero, so that a small multiple of it is exact.
const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN_2_LOW: f64 = 1.908_214_929_270_588e-10;
/// Below this the result is less than the smallest normal number, and zero is returned.
const EXP_ZERO_BELOW: f64 = -708.0;
/// Coefficients of exp's series, 1 / n! for n = 0..=13: 0.35^14 / 14! is below 1e-17.
const EXP_SERIES: [f64; 14] = inverse_factorials();
/// Terms of ln's series in s^2 <= 0.0295: 0.0295^12 / 25 is below 1e-19.
const N_LN_TERMS: u32 = 12;

/// e^x for x <= 0. Negative infinity gives zero.
pub(super) fn exp(x: f64) -> f64 {
    debug_assert!(x <= 0.0, "weights are relative to the maximum");
    if x < EXP_ZERO_BELOW {
        return 0.0;
    }
    // x = k ln 2 + r with |r| <= ln 2 / 2.
    let k = (x * std::f64::consts::LOG2_E + 0.5).floor();
    let r = (x - k * LN_2_HIGH) - k * LN_2_LOW;
    let mut sum = 0.0;
    for coefficient in EXP_SERIES.iter().rev() {
        sum = sum * r + coefficient;
    }
    sum * power_of_two(k)
}

const fn inverse_factorials() -> [f64; 14] {
    let mut series = [1.0; 14];
    let mut factorial = 1.0;
    let mut n = 1;
    while n < series.len() {
        factorial *= n as f64;
        series[n] = 1.0 / factorial;
        n += 1;
    }
    series
}

/// 2^k for an integer k in -1022..=0.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "k + 1023 lies in 1..=1023"
)]
fn power_of_two(k: f64) -> f64 {
    f64::from_bits(((k + 1023.0) as u64) << 52)
}

/// ln x for a finite x >= 1.
pub(super) fn ln(x: f64) -> f64 {
    debug_assert!(
        x >= 1.0 && x.is_finite(),
        "the most likely token alone weighs 1"
    );
    // x = 2^e m with m in [sqrt(1/2), sqrt(2)).
    let bits = x.to_bits();
    let mut exponent = f64::from(u32::try_from(bits >> 52).expect("12 bits")) - 1023.0;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if m >= std::f64::consts::SQRT_2 {
        m /= 2.0;
        exponent += 1.0;
    }
    // ln m = 2 (s + s^3/3 + s^5/5 + ..) with s = (m - 1) / (m + 1).
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut sum = 0.0;
    for n in (0..N_LN_TERMS).rev() {
        sum = sum * square + 1.0 / f64::from(2 * n + 1);
    }
    exponent * LN_2_HIGH + (2.0 * s * sum + exponent * LN_2_LOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_library_to_a_few_units() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e300), 0.0);
        let mut x = -0.000_1;
        while x > EXP_ZERO_BELOW {
            let expected = x.exp();
            assert!((exp(x) - expected).abs() <= 1e-15 * expected, "exp({x})");
            x *= 1.013;
        }
    }

    #[test]
    fn ln_agrees_with_the_library_to_a_few_units() {
        assert_eq!(ln(1.0), 0.0);
        let mut x = 1.000_000_1;
        while x < 1e9 {
            let expected = f64::ln(x);
            assert!(
                (ln(x) - expected).abs() <= 1e-15 * expected.max(1e-2),
                "ln({x})"
            );
            x *= 1.017;
        }
    }

    /// The bits themselves are the definition: a change here is a change of what every seed draws.
    #[test]
    fn the_bits_are_fixed() {
        assert_eq!(exp(-1.0).to_bits(), 0x3fd7_8b56_362c_ef38);
        assert_eq!(ln(2.0).to_bits(), 0x3fe6_2e42_fefa_39ef);
    }
}
