//! What whole-system tests share: real processes that end with their test, and the way to find them.
//!
//! The tests themselves lie beside `src/`, one folder a suite: `tidy/` holds the house to its drawing, `system/`
//! runs real binaries.
#![forbid(unsafe_code)]
