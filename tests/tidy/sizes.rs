//! Files and functions that fit a head.

use crate::source::{assert_none, is_test_file, rust_files};
use std::path::Path;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// Lines of a file, its test modules left out.
const FILE_LINES_MAX: usize = 520;
/// Lines from a function's signature to its closing brace.
const FUNCTION_LINES_MAX: usize = 80;
/// Parameters besides `self`.
const PARAMETERS_MAX: usize = 5;

struct Functions<'a> {
    path: &'a Path,
    findings: Vec<String>,
    test_lines: usize,
}

impl Functions<'_> {
    fn check(&mut self, signature: &syn::Signature, whole: &dyn Spanned) {
        let span = whole.span();
        let name = &signature.ident;
        let n_lines = span.end().line - signature.span().start().line + 1;
        if n_lines > FUNCTION_LINES_MAX {
            let place = self.path.display();
            self.findings.push(format!(
                "{place}: {name} has {n_lines} lines; {FUNCTION_LINES_MAX} are allowed"
            ));
        }
        let n_parameters = signature
            .inputs
            .iter()
            .filter(|input| matches!(input, syn::FnArg::Typed(_)))
            .count();
        // Kernels take their operands one by one.
        if n_parameters > PARAMETERS_MAX && !self.path.starts_with("kernels") {
            let place = self.path.display();
            self.findings.push(format!(
                "{place}: {name} has {n_parameters} parameters; {PARAMETERS_MAX} are allowed"
            ));
        }
    }
}

fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<syn::Path>()
                .is_ok_and(|path| path.is_ident("test"))
    })
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if is_test_only(&item.attrs) {
            let span = item.span();
            self.test_lines += span.end().line - span.start().line + 1;
            return;
        }
        visit::visit_item_mod(self, item);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.check(&item.sig, item);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.check(&item.sig, item);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.check(&item.sig, item);
        visit::visit_trait_item_fn(self, item);
    }
}

#[test]
fn files_and_functions_fit_a_head() {
    let mut findings = Vec::new();
    for (path, text) in rust_files() {
        let file =
            syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut functions = Functions {
            path: &path,
            findings: Vec::new(),
            test_lines: 0,
        };
        functions.visit_file(&file);
        if !is_test_file(&path) {
            findings.append(&mut functions.findings);
            let n_lines = text.lines().count() - functions.test_lines;
            if n_lines > FILE_LINES_MAX {
                findings.push(format!(
                    "{}: {n_lines} lines without tests; {FILE_LINES_MAX} are allowed",
                    path.display()
                ));
            }
        }
    }
    assert_none(&findings, "too large; split by idea, not by length:");
}

#[test]
fn every_file_says_why_it_is_there() {
    let mut findings = Vec::new();
    for (path, text) in rust_files() {
        if !text.starts_with("//!") && !is_test_file(&path) && !path.ends_with("build.rs") {
            findings.push(path.display().to_string());
        }
    }
    assert_none(&findings, "files without a module doc:");
}

#[test]
fn unsafe_stays_where_the_design_allows_it() {
    let allowed = [
        "kernels/",
        "kv-transfer/src/transport",
        "model-files/src/mapping.rs",
        "model-files/src/lib.rs",
    ];
    let mut findings = Vec::new();
    for (path, text) in rust_files() {
        let place = path.to_string_lossy();
        if allowed.iter().any(|start| place.starts_with(start)) || is_test_file(&path) {
            continue;
        }
        for (line_idx, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if code
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .any(|word| word == "unsafe")
            {
                findings.push(format!("{place}:{}", line_idx + 1));
            }
        }
    }
    assert_none(
        &findings,
        "unsafe outside kernels, transports and the one mmap call:",
    );
}
