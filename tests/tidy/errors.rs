//! An error says what failed, its source says why, and whoever prints walks the chain (`{error:#}`). An error whose
//! own text repeats its source is printed with every cause twice.

use crate::source::{assert_none, rust_files};
use syn::visit::{self, Visit};

#[derive(Default)]
struct Texts(Vec<String>);

impl Texts {
    fn check(&mut self, name: &syn::Ident, attributes: &[syn::Attribute], fields: &syn::Fields) {
        let text = attributes
            .iter()
            .filter(|attribute| attribute.path().is_ident("error"))
            .filter_map(|attribute| attribute.meta.require_list().ok())
            .map(|list| list.tokens.to_string())
            .next();
        let Some(text) = text else { return };
        for (field_idx, field) in fields.iter().enumerate() {
            let is_marked = field.attrs.iter().any(|attribute| {
                attribute.path().is_ident("from") || attribute.path().is_ident("source")
            });
            let place = field
                .ident
                .as_ref()
                .map_or_else(|| field_idx.to_string(), ToString::to_string);
            let shown = [format!("{{{place}}}"), format!("{{{place}:")];
            if (is_marked || place == "source") && shown.iter().any(|shown| text.contains(shown)) {
                self.0.push(format!("{name}: {text}"));
            }
        }
    }
}

impl<'ast> Visit<'ast> for Texts {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.check(&item.ident, &item.attrs, &item.fields);
        visit::visit_item_struct(self, item);
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.check(&variant.ident, &variant.attrs, &variant.fields);
        visit::visit_variant(self, variant);
    }
}

#[test]
fn no_error_repeats_its_source() {
    let mut findings = Vec::new();
    for (path, text) in rust_files() {
        let file = syn::parse_file(&text).expect("sizes.rs reports what does not parse");
        let mut texts = Texts::default();
        texts.visit_file(&file);
        let found = texts.0.into_iter();
        findings.extend(found.map(|finding| format!("{}: {finding}", path.display())));
    }
    assert_none(&findings, "leave the source out of the text:");
}

#[test]
fn a_repeated_source_is_found() {
    let text = r#"
        enum E {
            #[error("{file}: {source}")] A { file: String, source: io::Error },
            #[error("broken: {0}")] B(#[from] io::Error),
            #[error("broken: {0}")] C(String),
            #[error(transparent)] D(#[from] io::Error),
            #[error("{file}")] F { file: String, source: io::Error },
        }
    "#;
    let mut texts = Texts::default();
    texts.visit_file(&syn::parse_file(text).expect("it parses"));
    assert_eq!(texts.0.len(), 2, "{:?}", texts.0);
}
