//! Every operation of the AVX-512 type against the array type, where the CPU has it.

use super::portable::Portable;
use super::*;
use crate::cpu::isa::Isa;
use crate::cpu::test_data::{Stream, floats};

/// The results of all operations on some numbers, as bits.
struct Everything<'a> {
    floats: &'a [[f32; 16]; 16],
    bytes: &'a [u8; 128],
}

impl WideKernel for Everything<'_> {
    type Output = Vec<u32>;

    #[inline(always)]
    fn run<W: Wide>(self, w: W) -> Vec<u32> {
        let mut found = Vec::new();
        let mut keep = |lanes: [f32; 16]| found.extend(lanes.map(f32::to_bits));
        let mut narrow = [0_u8; 112];
        // SAFETY: every place below has the bytes that the operation reads or writes.
        unsafe {
            let [a, b, c] = [0, 1, 2].map(|i: usize| w.load(self.floats[i].as_ptr()));
            for result in [w.add(a, b), w.sub(a, b), w.mul(a, b), w.div(a, b)] {
                keep(w.array(result));
            }
            for result in [w.fma(a, b, c), w.fnma(a, b, c), w.fms(a, b, c), w.neg(a)] {
                keep(w.array(result));
            }
            let scaled = w.mul(a, w.splat(100.0));
            for result in [w.max(a, b), w.min(a, b), w.round(scaled)] {
                keep(w.array(result));
            }
            keep(w.array(w.power_of_two(w.round(scaled))));
            keep(w.array(w.zero_below(a, b, 0.25)));
            let mut all = [a; 16];
            for (lanes, from) in all.iter_mut().zip(self.floats) {
                *lanes = w.load(from.as_ptr());
            }
            let fours = all.as_chunks::<4>().0;
            let mut folded = [a; 4];
            for (folded, four) in folded.iter_mut().zip(fours) {
                *folded = w.fold_four(*four);
            }
            keep(w.array(w.fold_fours(folded)));
            let at = self.bytes.as_ptr();
            let pair = [at, at.add(61)];
            keep(w.array(w.elements::<F32>(pair)));
            keep(w.array(w.elements::<F16>(pair)));
            keep(w.array(w.elements::<Bf16>(pair)));
            keep(w.array(w.unsigned(pair)));
            keep(w.array(w.signed(pair)));
            let (x, y) = (w.bytes(pair), w.four(at.add(17).cast()));
            let ints = [
                w.and(x, y),
                w.or(x, y),
                w.xor(x, y),
                w.up::<3>(x),
                w.down::<5>(x),
                w.dot(w.splat_int(7), x, y),
                w.max_int(x, y),
                w.to_int(scaled),
                w.bits(a),
            ];
            for result in ints {
                keep(w.array(w.to_float(result)));
            }
            let [first, second] = w.sums_int(w.down::<9>(x), w.down::<8>(w.bits(a)));
            keep([first as f32; 16]);
            keep([second as f32; 16]);
            keep([w.largest_int(x) as f32; 16]);
            w.store_f16(a, narrow.as_mut_ptr());
            w.store_low_bytes(x, narrow.as_mut_ptr().add(32).cast());
            w.store(b, narrow.as_mut_ptr().add(48).cast());
        }
        found.extend(narrow.map(u32::from));
        found
    }
}

#[test]
fn operations_mean_the_same_on_both_types() {
    for seed in 0..50 {
        let numbers = floats(seed, 256);
        let floats: [[f32; 16]; 16] =
            std::array::from_fn(|row| std::array::from_fn(|i| numbers[row * 16 + i]));
        let mut stream = Stream(seed);
        // Exponents stay below those of infinities and NaN, whose bits are not promised.
        let bytes = std::array::from_fn(|_| stream.next() as u8 & 0xbb);
        let everything = || Everything {
            floats: &floats,
            bytes: &bytes,
        };
        let wanted = everything().run(Portable);
        for isa in Isa::available() {
            let found = match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the value holds the proof.
                Isa::Avx512(proof) => unsafe { run(proof, everything()) },
                _ => continue,
            };
            assert_eq!(found, wanted, "{}", isa.name());
        }
    }
}
