//! Who may depend on whom: the picture of ARCHITECTURE.md as data, held against `cargo metadata`.

use crate::source::{assert_none, root};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Each crate with what it may use. Dev-dependencies are free: a test may reach across.
const EDGES: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("proto", &["core"]),
    ("kernels", &["core"]),
    ("model-files", &["core"]),
    ("engine", &["core", "kernels", "model-files"]),
    ("kv-transfer", &["core", "kernels"]),
    ("service", &["core", "proto"]),
    (
        "prefill-node",
        &[
            "core",
            "proto",
            "kernels",
            "model-files",
            "engine",
            "kv-transfer",
            "service",
        ],
    ),
    (
        "decode-node",
        &[
            "core",
            "proto",
            "kernels",
            "model-files",
            "engine",
            "kv-transfer",
            "service",
        ],
    ),
    ("router", &["core", "proto", "model-files", "service"]),
    (
        "sim",
        &[
            "core",
            "proto",
            "kernels",
            "model-files",
            "engine",
            "kv-transfer",
            "service",
            "prefill-node",
            "decode-node",
            "router",
        ],
    ),
    (
        "cli",
        &[
            "core",
            "proto",
            "kernels",
            "model-files",
            "engine",
            "kv-transfer",
            "service",
            "prefill-node",
            "decode-node",
            "router",
            "sim",
        ],
    ),
    (
        "tests",
        &[
            "core",
            "proto",
            "kernels",
            "model-files",
            "engine",
            "kv-transfer",
            "service",
            "prefill-node",
            "decode-node",
            "router",
            "sim",
        ],
    ),
];

/// Libraries that a crate must not touch, since they stand for something that it must not know.
const FORBIDDEN: &[(&str, &[&str])] = &[
    (
        "core",
        &["tokio", "tonic", "prost", "axum", "hyper", "cudarc"],
    ),
    ("kernels", &["tokio", "tonic", "prost", "axum", "hyper"]),
    (
        "model-files",
        &["tokio", "tonic", "prost", "axum", "hyper", "reqwest"],
    ),
    ("engine", &["tokio", "tonic", "prost", "axum", "hyper"]),
    ("kv-transfer", &["tonic", "prost", "axum", "hyper"]),
    ("prefill-node", &["axum", "hyper"]),
    ("decode-node", &["axum", "hyper"]),
];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
}

fn packages() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: Metadata = serde_json::from_slice(&output.stdout).expect("cargo's own JSON");
    metadata
        .packages
        .into_iter()
        .map(|package| {
            let used = package
                .dependencies
                .into_iter()
                .filter(|dependency| dependency.kind.is_none());
            (
                package.name,
                used.map(|dependency| dependency.name).collect(),
            )
        })
        .collect()
}

#[test]
fn crates_use_only_what_the_picture_allows() {
    let packages = packages();
    assert_eq!(
        packages.len(),
        EDGES.len(),
        "a new crate needs a new direction of dependency"
    );
    let mut findings = Vec::new();
    for (folder, allowed) in EDGES {
        let used = packages
            .get(&format!("tidemill-{folder}"))
            .unwrap_or_else(|| panic!("tidemill-{folder} is not in the workspace"));
        for name in used {
            let Some(ours) = name.strip_prefix("tidemill-") else {
                continue;
            };
            if !allowed.contains(&ours) {
                findings.push(format!("{folder} uses {ours}"));
            }
        }
    }
    assert_none(&findings, "edges that ARCHITECTURE.md does not draw:");
}

#[test]
fn crates_do_not_touch_what_they_must_not_know() {
    let packages = packages();
    let mut findings = Vec::new();
    for (folder, forbidden) in FORBIDDEN {
        for name in forbidden
            .iter()
            .filter(|name| packages[&format!("tidemill-{folder}")].contains(**name))
        {
            findings.push(format!("{folder} uses {name}"));
        }
    }
    assert_none(&findings, "libraries that a crate must not know:");
}
