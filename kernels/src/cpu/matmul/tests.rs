use super::*;
use crate::cpu::packed::{RawMatrix, WeightFormat};
use crate::cpu::test_data::{floats, weight_bytes};
use proptest::prelude::*;

const FORMATS: [WeightFormat; WeightFormat::ALL.len()] = WeightFormat::ALL;

fn matrix(seed: u64, format: WeightFormat, n_outputs: usize, n_inputs: usize) -> PackedMatrix {
    let bytes = weight_bytes(seed, format, n_outputs * n_inputs);
    let raw = RawMatrix {
        format,
        n_outputs,
        n_inputs,
        bytes: &bytes,
    };
    PackedMatrix::pack(&raw, |i| i).expect("valid")
}

fn rows(seed: u64, n_rows: usize, n_columns: usize) -> Activations {
    let mut rows = Activations::new(true);
    rows.resize(n_rows, n_columns);
    rows.values_mut()
        .copy_from_slice(&floats(seed, n_rows * n_columns));
    rows.quantise(Isa::Scalar);
    rows
}

fn product(isa: Isa, threads: usize, matrices: &[&PackedMatrix], input: &Activations) -> Vec<u32> {
    let n: usize = matrices.iter().map(|m| m.n_outputs()).sum();
    let mut output = vec![f32::NAN; n * input.n_rows()];
    let mut team = Team::new(threads).expect("threads start");
    matmul(
        isa,
        &mut team,
        matrices,
        input,
        Output::Replace(&mut output),
    );
    output.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn variants_and_threads_give_the_same_bits(
        seed in any::<u64>(),
        n_rows in 1_usize..14,
        n_outputs in 1_usize..70,
        n_groups in 1_usize..5,
        format in 0..FORMATS.len(),
        other in 0..FORMATS.len(),
    ) {
        let (first, second) = (FORMATS[format], FORMATS[other]);
        let block = first.block().0.max(second.block().0).max(32);
        let n_inputs = n_groups * block;
        let first = matrix(seed, first, n_outputs, n_inputs);
        let second = matrix(!seed, second, 9, n_inputs);
        let input = rows(seed, n_rows, n_inputs);
        let wanted = product(Isa::Scalar, 1, &[&first, &second], &input);
        for isa in Isa::available() {
            prop_assert_eq!(&product(isa, 1, &[&first, &second], &input), &wanted);
            prop_assert_eq!(&product(isa, 3, &[&first, &second], &input), &wanted);
        }
    }
}

#[test]
fn one_row_alone_equals_itself_among_seventeen() {
    for format in FORMATS {
        let n = format.block().0.max(96);
        let weights = matrix(7, format, 37, n);
        let many = rows(11, 17, n);
        let together = product(Isa::detect(), 2, &[&weights], &many);
        for row in 0..17 {
            let mut one = Activations::new(true);
            one.resize(1, n);
            one.values_mut()
                .copy_from_slice(&many.values()[row * n..(row + 1) * n]);
            one.quantise(Isa::detect());
            let alone = product(Isa::detect(), 1, &[&weights], &one);
            assert_eq!(
                alone,
                together[row * 37..(row + 1) * 37],
                "{format:?} row {row}"
            );
        }
    }
}

#[test]
fn products_are_close_to_exact_ones() {
    for format in FORMATS {
        let n = format.block().0.max(64);
        let weights = matrix(5, format, 19, n);
        let input = rows(6, 3, n);
        let found = product(Isa::detect(), 1, &[&weights], &input);
        let mut row = vec![0.0; n];
        for output in 0..19 {
            weights.row_to_f32(output, &mut row);
            for r in 0..3 {
                let x = &input.values()[r * n..(r + 1) * n];
                let terms = row
                    .iter()
                    .zip(x)
                    .map(|(w, x)| f64::from(*w) * f64::from(*x));
                let (wanted, size) =
                    terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
                let found = f64::from(f32::from_bits(found[r * 19 + output]));
                // int8 activations: half a step of 1/127 of the largest in each group.
                let bound = if weights.is_quantised() { 0.012 } else { 1e-6 };
                assert!(
                    (found - wanted).abs() <= bound * size,
                    "{format:?}: {found} {wanted}"
                );
            }
        }
    }
}

#[test]
fn the_largest_weights_and_activations_do_not_overflow() {
    let mut bytes = half::f16::from_f32(1.0).to_le_bytes().to_vec();
    bytes.extend([0x80; 32]);
    let raw = RawMatrix {
        format: WeightFormat::Q8_0,
        n_outputs: 1,
        n_inputs: 32,
        bytes: &bytes,
    };
    let weights = PackedMatrix::pack(&raw, |i| i).expect("valid");
    for sign in [1.0, -1.0] {
        let mut input = Activations::new(true);
        input.resize(1, 32);
        input.values_mut().fill(sign * 127.0);
        input.quantise(Isa::detect());
        for isa in Isa::available() {
            let found = f32::from_bits(product(isa, 1, &[&weights], &input)[0]);
            assert_eq!(found, sign * -128.0 * 127.0 * 32.0);
        }
    }
}

#[test]
fn a_fault_stays_in_its_row_and_adding_adds() {
    let weights = matrix(5, WeightFormat::Q4_1, 8, 64);
    let mut input = rows(6, 2, 64);
    input.values_mut()[70] = f32::NAN;
    input.quantise(Isa::detect());
    let mut output = vec![1.0; 16];
    let mut team = Team::new(1).expect("no threads needed");
    matmul(
        Isa::detect(),
        &mut team,
        &[&weights],
        &input,
        Output::Add(&mut output),
    );
    let plain = product(Isa::detect(), 1, &[&weights], &input);
    for column in 0..8 {
        assert_eq!(output[column], 1.0 + f32::from_bits(plain[column]));
        assert!(output[8 + column].is_nan());
    }
}
