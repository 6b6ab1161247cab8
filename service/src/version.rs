//! Which build this is: the version of the workspace and the commit that it was made from.
//!
//! One place for all binaries, so that a bug report's `--version` always names the source; `build.rs` finds the commit.

/// What `--version` prints behind the program's name, and what logs call the build.
pub const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (revision ",
    env!("TIDEMILL_REVISION"),
    ")"
);
