//! Says in one line which instruction sets the kernels' tests compare on this machine, and which it lacks. A green run
//! on a CPU without AVX-512 has not run those kernels; a summary that does not say so would be taken for more.

use std::io::Write;
use tidemill_kernels::cpu::Isa;

/// All that the kernels are written for, the reference first.
const KNOWN: [&str; 3] = ["scalar", "avx2", "avx512"];

fn main() -> std::io::Result<()> {
    let ran: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
    let lacking: Vec<&str> = KNOWN
        .into_iter()
        .filter(|name| !ran.contains(name))
        .collect();
    let lacking = match lacking[..] {
        [] => "nothing".to_owned(),
        _ => lacking.join(", "),
    };
    let ran = ran.join(", ");
    writeln!(
        std::io::stdout(),
        "vector units: {ran}; not on this CPU, so not run: {lacking}"
    )
}
