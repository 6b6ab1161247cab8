use super::*;
use crate::testing::quantise;

fn row(dtype: WeightType, bytes: &[u8], n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n];
    to_f32(dtype, bytes, &mut out);
    out
}

fn f16_bytes(value: f32) -> [u8; 2] {
    f16::from_f32(value).to_le_bytes()
}

#[test]
fn floats_are_exact() {
    assert_eq!(row(WeightType::F32, &1.5_f32.to_le_bytes(), 1), [1.5]);
    assert_eq!(row(WeightType::F16, &f16_bytes(-0.125), 1), [-0.125]);
    assert_eq!(row(WeightType::BF16, &[0xc0, 0x3f], 1), [1.5]);
}

#[test]
fn q8_is_scale_times_level() {
    let mut bytes = f16_bytes(0.5).to_vec();
    bytes.extend((0..32_u8).map(|idx| (idx.cast_signed() - 16).cast_unsigned()));
    let expected: Vec<f32> = (0..32).map(|idx| (idx - 16) as f32 * 0.5).collect();
    assert_eq!(row(WeightType::Q8_0, &bytes, 32), expected);
    bytes[2] = 0x80;
    assert_eq!(row(WeightType::Q8_0, &bytes, 32)[0], -64.0, "level -128");
}

/// Nibble byte `i` is `0x(15-i)(i)`: low half counts up, high half counts down.
fn counting_nibbles() -> impl Iterator<Item = u8> {
    (0..16_u8).map(|idx| idx | (15 - idx) << 4)
}

fn counting_levels() -> impl Iterator<Item = i32> {
    (0..16).chain((0..16).rev())
}

#[test]
fn q4_takes_low_nibbles_first() {
    let mut bytes = f16_bytes(2.0).to_vec();
    bytes.extend(counting_nibbles());
    let expected: Vec<f32> = counting_levels()
        .map(|level| (level - 8) as f32 * 2.0)
        .collect();
    assert_eq!(row(WeightType::Q4_0, &bytes, 32), expected);

    let mut bytes = [f16_bytes(2.0), f16_bytes(-3.0)].concat();
    bytes.extend(counting_nibbles());
    let expected: Vec<f32> = counting_levels()
        .map(|level| level as f32 * 2.0 - 3.0)
        .collect();
    assert_eq!(row(WeightType::Q4_1, &bytes, 32), expected);
}

#[test]
fn q5_takes_bit_i_of_the_word_for_element_i() {
    let fifth_bits = 1_u32 | 1 << 15 | 1 << 16 | 1 << 31;
    let level = |(idx, level): (usize, i32)| level + 16 * i32::from(fifth_bits >> idx & 1 == 1);
    let levels = || counting_levels().enumerate().map(level);

    let mut bytes = f16_bytes(1.0).to_vec();
    bytes.extend(fifth_bits.to_le_bytes());
    bytes.extend(counting_nibbles());
    let expected: Vec<f32> = levels().map(|level| (level - 16) as f32).collect();
    assert_eq!(row(WeightType::Q5_0, &bytes, 32), expected);

    let mut bytes = [f16_bytes(1.0), f16_bytes(0.25)].concat();
    bytes.extend(fifth_bits.to_le_bytes());
    bytes.extend(counting_nibbles());
    let expected: Vec<f32> = levels().map(|level| level as f32 + 0.25).collect();
    assert_eq!(row(WeightType::Q5_1, &bytes, 32), expected);
}

/// A type, the halves that are put into counting bytes, some elements, and the sum of all.
type SuperBlock = (WeightType, &'static [(usize, f32)], [(usize, f32); 6], f64);

/// What the `gguf` Python package makes of the same bytes.
#[test]
fn super_blocks_mean_what_others_read_in_them() {
    let wanted: [SuperBlock; 3] = [
        (
            WeightType::Q4K,
            &[(0, 1.0), (2, 0.5)],
            [
                (0, 315.5),
                (1, -25.5),
                (32, 8.0),
                (127, 81.0),
                (160, 525.0),
                (255, 48.5),
            ],
            54_440.0,
        ),
        (
            WeightType::Q5K,
            &[(0, 1.0), (2, 0.5)],
            [
                (0, 811.5),
                (1, -25.5),
                (32, 112.0),
                (127, -3.0),
                (160, 165.0),
                (255, 108.5),
            ],
            116_216.0,
        ),
        (
            WeightType::Q6K,
            &[(208, 0.5)],
            [
                (0, -715.5),
                (1, 848.0),
                (32, 115.5),
                (127, 750.0),
                (160, 335.5),
                (255, -30.0),
            ],
            2306.0,
        ),
    ];
    for (dtype, scales, elements, sum) in wanted {
        let mut bytes: Vec<u8> = (0..dtype.block_bytes())
            .map(|i| (i * 37 + 11) as u8)
            .collect();
        for (at, scale) in scales {
            bytes[*at..at + 2].copy_from_slice(&f16_bytes(*scale));
        }
        let values = row(dtype, &bytes, 256);
        for (idx, wanted) in elements {
            assert_eq!(values[idx], wanted, "{dtype:?} {idx}");
        }
        assert_eq!(
            values.iter().copied().map(f64::from).sum::<f64>(),
            sum,
            "{dtype:?}"
        );
    }
}

/// Values that a type can hold exactly survive writing and reading; so does a row of zeros.
#[test]
fn quantising_inverts_dequantising() {
    let values: Vec<f32> = (0..256).map(|idx| (idx % 16 - 8) as f32).collect();
    for dtype in WeightType::ALL {
        let bytes = quantise(dtype, &values);
        assert_eq!(
            bytes.len(),
            256 / dtype.block_elements() * dtype.block_bytes()
        );
        let worst = row(dtype, &bytes, 256)
            .iter()
            .zip(&values)
            .fold(0.0_f32, |worst, (ours, theirs)| {
                worst.max((ours - theirs).abs())
            });
        let exact = matches!(
            dtype,
            WeightType::F32
                | WeightType::F16
                | WeightType::BF16
                | WeightType::Q4_0
                | WeightType::Q4_1
        );
        assert!(
            if exact { worst == 0.0 } else { worst <= 0.26 },
            "{dtype:?}: {worst}"
        );
        let zeros = [0.0; 256];
        assert_eq!(
            row(dtype, &quantise(dtype, &zeros), 256),
            zeros,
            "{dtype:?}"
        );
    }
}
