//! exp, ln, sine and cosine in double precision, out of additions and multiplications only.
//!
//! Tables (rope) and log-probabilities must come out the same in every build and on every host, which no C library
//! promises. These are argument reductions followed by Taylor (or atanh) series long enough for about one unit in
//! the last place; speed does not matter here. Source of the method: Muller, Elementary Functions, chapters 3 and 11.

use std::f64::consts::{FRAC_2_PI, LN_2, LOG2_E};

// ln 2 and pi/2 in parts with trailing zero bits, so that small multiples of the leading parts are exact.
const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
const HALF_PI_1: f64 = 1.570_796_326_734_125_6;
const HALF_PI_2: f64 = 6.077_100_506_303_966e-11;
const HALF_PI_3: f64 = 2.022_266_248_711_166_5e-21;

/// e to the power of `x`; 0 below -708, infinity above 709, NaN for NaN.
pub(crate) fn exp(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x < -708.0 {
        return 0.0;
    }
    if x > 709.0 {
        return f64::INFINITY;
    }
    let n = (x * LOG2_E).round();
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut sum = 1.0;
    for k in (1..=14).rev() {
        sum = 1.0 + r / f64::from(k) * sum;
    }
    // n is -1021 to 1023 here, so the exponent stays normal.
    sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// Natural logarithm of a positive normal number; NaN for negative numbers and NaN, -infinity for 0.
pub(crate) fn ln(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    if x.is_infinite() {
        return x;
    }
    if x < f64::MIN_POSITIVE {
        return ln(x * (1_u64 << 54) as f64) - 54.0 * LN_2;
    }
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln m = 2 atanh((m - 1) / (m + 1)), and the argument is at most 0.172.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut series = 0.0;
    for k in (0..=11).rev() {
        series = series * square + 1.0 / f64::from(2 * k + 1);
    }
    let n = exponent as f64;
    n * LN_2_HIGH + (2.0 * s * series + n * LN_2_LOW)
}

/// Sine and cosine of `x` radians, for magnitudes below 2^20.
pub(crate) fn sin_cos(x: f64) -> (f64, f64) {
    let n = (x * FRAC_2_PI).round();
    let r = ((x - n * HALF_PI_1) - n * HALF_PI_2) - n * HALF_PI_3;
    let square = r * r;
    let mut sine = 1.0;
    let mut cosine = 1.0;
    for k in (1..=9).rev() {
        let k2 = f64::from(2 * k);
        sine = 1.0 - square / (k2 * (k2 + 1.0)) * sine;
        cosine = 1.0 - square / (k2 * (k2 - 1.0)) * cosine;
    }
    sine *= r;
    match (n as i64).rem_euclid(4) {
        0 => (sine, cosine),
        1 => (cosine, -sine),
        2 => (-sine, -cosine),
        _ => (-cosine, sine),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, wanted: f64) {
        let bound = wanted.abs().max(1e-300) * 4e-16;
        assert!(
            (found - wanted).abs() <= bound,
            "{found:e} is not {wanted:e}"
        );
    }

    #[test]
    fn exp_and_ln_agree_with_the_library() {
        for i in -70_000..70_000 {
            let x = f64::from(i) * 0.01;
            close(exp(x), x.exp());
            if i > 0 {
                close(ln(x), x.ln());
            }
        }
        for i in -300..300 {
            let x = 10_f64.powi(i);
            close(ln(x), x.ln());
        }
        close(ln(5e-324), 5e-324_f64.ln());
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(ln(1.0), 0.0);
        assert!(exp(f64::NAN).is_nan() && ln(-1.0).is_nan());
    }

    #[test]
    fn sine_and_cosine_agree_with_the_library() {
        for i in -200_000..200_000 {
            let x = f64::from(i) * 0.37;
            let (sine, cosine) = sin_cos(x);
            assert!((sine - x.sin()).abs() < 3e-16, "sin {x}");
            assert!((cosine - x.cos()).abs() < 3e-16, "cos {x}");
        }
    }
}
