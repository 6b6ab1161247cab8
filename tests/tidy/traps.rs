//! Faults that people met in other servers, and the test that looks for each of them here.
//!
//! The ids are those of the project's list of traps; a test that exists for one alone begins with its id. A row without
//! a test says why the fault cannot happen here. Renaming or removing a test fails this check, so that no row loses its
//! test unseen.

use crate::source::{assert_none, root};
use std::collections::BTreeSet;
use std::path::Path;
use syn::visit::{self, Visit};

/// Where a trap is looked for.
enum Found {
    /// By these tests, as `file::name`.
    By(&'static [&'static str]),
    /// Nowhere, for this reason.
    NotHere(&'static str),
}

use Found::{By, NotHere};

/// Id, what goes wrong, and its tests.
const TRAPS: &[(&str, &str, Found)] = &[
    // The public interface.
    (
        "B011",
        "the beginning of a stop string gets out",
        By(&[
            "router/src/text/stop.rs::b011_nothing_of_a_stop_string_over_several_tokens_is_sent",
            "router/tests/http/streams.rs::b011_no_part_of_a_stop_string_gets_out_on_either_endpoint",
        ]),
    ),
    (
        "B012",
        "held text is lost at the end",
        By(&[
            "router/src/text/stop.rs::b012_held_text_that_became_no_stop_string_is_given_out",
            "router/tests/http/streams.rs::b012_held_text_is_flushed_at_every_end",
        ]),
    ),
    (
        "B017",
        "an empty prompt",
        By(&["router/tests/http/errors.rs::b017_an_empty_prompt_is_refused"]),
    ),
    (
        "B018",
        "no tokens at all, or a count that is none",
        By(&[
            "router/src/http/fields.rs::b018_counts_are_whole_and_within_their_bound",
            "router/src/http/chat_request.rs::b018_a_chat_of_no_tokens_is_refused",
            "router/src/http/completion_request.rs::b018_no_tokens_need_an_echo",
            "router/tests/http/streams.rs::b018_scoring_a_prompt_generates_nothing",
        ]),
    ),
    (
        "B020",
        "a prompt as long as the context",
        By(&["router/tests/http/errors.rs::b020_the_context_limit_is_one_and_is_told"]),
    ),
    (
        "B032",
        "deep nesting in a field that nobody reads",
        By(&["router/src/http/json.rs::b032_depth_is_bounded_also_in_unknown_fields"]),
    ),
    (
        "B036",
        "text and finish reason in one chunk",
        By(&["router/tests/http/streams.rs::b036_the_order_of_chunks_of_a_chat"]),
    ),
    (
        "B037",
        "no finish reason, or two",
        By(&["router/tests/http/streams.rs::b037_exactly_one_reason_for_each_choice"]),
    ),
    (
        "B038",
        "pieces of tool arguments that are no JSON together",
        NotHere("requests with tools are refused by name, so no answer has tool arguments"),
    ),
    (
        "B109",
        "large and odd bodies, and lengths that lie",
        By(&[
            "router/src/http/body.rs::b109_only_plain_json_of_a_fair_length",
            "router/src/http/body.rs::b109_a_second_header_is_read_too",
            "router/src/http/body.rs::b109_an_endless_body_stops_at_the_limit",
            "router/src/http/json.rs::b109_odd_bodies_are_refused",
            "router/tests/http/errors.rs::b109_bodies_are_bounded_and_must_be_json",
            "router/tests/http/connections.rs::b109_a_content_length_that_lies_is_no_request",
            "router/tests/http/connections.rs::b109_a_body_that_breaks_off_is_no_request",
            "router/tests/http/connections.rs::b109_a_length_beside_chunks_hides_no_second_request",
            "tests/system/hostile.rs::b109_large_bodies_are_refused_while_they_come",
        ]),
    ),
    // Text and tokens.
    (
        "B015",
        "a character over two tokens is broken",
        By(&[
            "router/src/text/tests.rs::b015_the_pieces_are_the_whole",
            "router/tests/http/streams.rs::b015_characters_over_token_boundaries_and_invalid_bytes",
        ]),
    ),
    (
        "B016",
        "bytes that never become a character are held for ever",
        By(&["router/src/text/tests.rs::b016_bytes_that_never_become_characters_drain"]),
    ),
    (
        "B063",
        "a template that fails is replaced by another in silence",
        By(&[
            "model-files/src/text/chat_template/tests.rs::a_failing_template_is_an_error_with_its_line",
            "model-files/src/text/chat_template/tests.rs::python_methods_and_filters_work",
        ]),
    ),
    (
        "B064",
        "methods of Python in a template, and what it raises",
        By(&[
            "model-files/src/text/chat_template/tests.rs::python_methods_and_filters_work",
            "model-files/src/text/chat_template/tests.rs::what_a_template_raises_reaches_the_client",
            "model-files/src/text/hf_text/tests.rs::a_bad_template_or_file_is_found_at_opening",
        ]),
    ),
    // Sampling.
    (
        "B021",
        "a bias on a token that does not exist",
        By(&[
            "router/src/http/sampling.rs::b021_biases_are_read_in_openais_form",
            "router/tests/http/errors.rs::b021_a_bias_that_means_no_token_reaches_nobody",
            "router/tests/http/sampling.rs::b021_b022_b110_what_the_model_cannot_take_is_refused_by_name",
        ]),
    ),
    (
        "B022",
        "a stop token or prompt token that does not exist",
        By(&[
            "router/src/http/request.rs::b022_stop_token_ids_are_bounded",
            "router/tests/http/errors.rs::b022_token_ids_are_checked_against_the_vocabulary",
        ]),
    ),
    (
        "B050",
        "a temperature close to zero",
        By(&["engine/src/sampler/tests.rs::a_tiny_temperature_is_greedy"]),
    ),
    (
        "B051",
        "a row without numbers fails its neighbours, uncounted",
        By(&[
            "engine/src/sampler/tests.rs::unusable_rows_are_errors_and_barred_tokens_are_not",
            "engine/src/executor/cpu/tests.rs::a_row_without_numbers_fails_alone",
            "engine/src/scheduler/tests.rs::a_bad_answer_of_the_executor_ends_only_what_it_touches",
            "router/src/run/metrics.rs::b051_every_failure_is_counted_under_its_code",
        ]),
    ),
    (
        "B053",
        "a seed that depends on company",
        By(&[
            "engine/src/sampler/tests.rs::a_draw_depends_on_seed_and_place_alone",
            "tests/promise/real.rs::the_default_model_gives_the_same_in_a_crowd",
        ]),
    ),
    (
        "B054",
        "equal answers without a seed",
        By(&["router/tests/http/prompts.rs::b054_choices_have_streams_of_their_own"]),
    ),
    (
        "B110",
        "values at and beyond the edge of sampling",
        By(&[
            "router/src/http/sampling.rs::b110_edge_values_of_sampling",
            "router/src/http/request.rs::b110_the_number_of_choices_and_of_tokens",
            "router/src/http/chat_request.rs::b110_logprobs_are_bounded",
            "router/tests/http/sampling.rs::b021_b022_b110_what_the_model_cannot_take_is_refused_by_name",
        ]),
    ),
    // Bounds of the public port.
    (
        "B077",
        "slow and silent connections",
        By(&[
            "service/src/accept/tests.rs::b077_a_header_has_its_time",
            "router/src/http/body.rs::b077_a_silent_body_times_out",
            "router/src/http/body.rs::b077_a_body_that_drips_has_a_minute_in_all",
            "router/tests/http/connections.rs::b077_silent_and_dripping_connections_are_closed",
        ]),
    ),
    (
        "B085",
        "a giant header",
        By(&[
            "service/src/accept/tests.rs::b085_an_http2_header_is_bounded_in_bytes",
            "service/src/accept/tests.rs::b085_a_header_without_end_is_cut_off",
            "router/tests/http/connections.rs::b085_headers_are_bounded",
        ]),
    ),
    (
        "B100",
        "streams that are opened and reset in a loop",
        By(&[
            "service/src/accept/tests.rs::b100_resets_of_one_http2_connection_are_bounded",
            "service/src/accept/tests.rs::b100_resets_that_a_peer_provokes_are_bounded",
            "router/tests/http/connections.rs::b100_a_reset_http2_stream_cancels_its_request",
        ]),
    ),
    (
        "B108",
        "huge arrays",
        By(&[
            "router/src/http/json.rs::b108_the_number_of_values_is_bounded",
            "router/src/http/chat_request.rs::b108_huge_arrays_are_refused",
            "router/src/http/request.rs::b108_stop_strings_are_bounded",
        ]),
    ),
];

/// Names of functions that the test runner calls.
#[derive(Default)]
struct Tests(BTreeSet<String>);

impl<'ast> Visit<'ast> for Tests {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        let is_test = |attribute: &syn::Attribute| {
            let last = attribute.path().segments.last();
            last.is_some_and(|segment| segment.ident == "test")
        };
        let is_ignored = |attribute: &syn::Attribute| attribute.path().is_ident("ignore");
        if item.attrs.iter().any(is_test) && !item.attrs.iter().any(is_ignored) {
            self.0.insert(item.sig.ident.to_string());
        }
        visit::visit_item_fn(self, item);
    }

    /// Properties are written within a macro, each as a function.
    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let last = call.path.segments.last();
        if last.is_none_or(|segment| segment.ident != "proptest") {
            return;
        }
        let words: Vec<String> = call
            .tokens
            .clone()
            .into_iter()
            .map(|it| it.to_string())
            .collect();
        let names = words.windows(2).filter(|pair| pair[0] == "fn");
        self.0.extend(names.map(|pair| pair[1].clone()));
    }
}

fn tests_of(text: &str) -> BTreeSet<String> {
    let mut tests = Tests::default();
    tests.visit_file(&syn::parse_file(text).expect("sizes.rs reports what does not parse"));
    tests.0
}

/// What is wrong with one entry, if anything.
fn problem(root: &Path, place: &str) -> Option<String> {
    let Some((file, name)) = place.split_once("::") else {
        return Some("no file::name".to_owned());
    };
    let Ok(text) = std::fs::read_to_string(root.join(file)) else {
        return Some(format!("{file} is not there"));
    };
    (!tests_of(&text).contains(name)).then(|| format!("{file} has no test {name}"))
}

#[test]
fn every_trap_has_its_test_or_a_reason() {
    let root = root();
    let mut findings = Vec::new();
    let mut ids = BTreeSet::new();
    for (id, words, found) in TRAPS {
        assert!(ids.insert(id), "{id} is there twice");
        match found {
            NotHere("") => findings.push(format!("{id}: no reason")),
            NotHere(_) => {}
            By([]) => findings.push(format!("{id}: no test looks for: {words}")),
            By(places) => {
                let problems = places.iter().filter_map(|place| problem(&root, place));
                findings.extend(problems.map(|problem| format!("{id} ({words}): {problem}")));
            }
        }
    }
    assert_none(
        &findings,
        "traps without their tests; name the ones that replaced them:",
    );
}

#[test]
fn a_test_that_is_gone_ignored_or_no_test_is_found() {
    let text = "
        fn plain() {}
        #[test] #[ignore] fn ignored() {}
        mod tests {
            #[test] fn one() {}
            #[tokio::test(start_paused = true)] async fn two() {}
            proptest! { #[test] fn three(x in 0..9) { assert!(x < 9); } }
        }
    ";
    assert_eq!(
        tests_of(text).into_iter().collect::<Vec<_>>(),
        ["one", "three", "two"]
    );
    let root = root();
    assert!(problem(&root, "tests/tidy/traps.rs").is_some());
    assert!(problem(&root, "tests/tidy/gone.rs::one").is_some());
    assert!(problem(&root, "tests/tidy/traps.rs::tests_of").is_some());
}
