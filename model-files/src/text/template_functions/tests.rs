use super::*;

fn evaluate(source: &str) -> Result<String, Error> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(200_000));
    add_to(&mut environment);
    environment.render_str(source, ())
}

fn at(seconds: u64) -> Timestamp {
    Timestamp(seconds * 1_000_000)
}

#[test]
fn dates_are_those_of_the_calendar() {
    let format = "%Y-%m-%d %H:%M:%S %a %j %d %b %Y %I%p %-d.%-m. %%";
    for (seconds, expected) in [
        (0, "1970-01-01 00:00:00 Thu 001 01 Jan 1970 12AM 1.1. %"),
        (
            951_782_400,
            "2000-02-29 00:00:00 Tue 060 29 Feb 2000 12AM 29.2. %",
        ),
        (
            1_735_689_599,
            "2024-12-31 23:59:59 Tue 366 31 Dec 2024 11PM 31.12. %",
        ),
        (
            4_107_542_400,
            "2100-03-01 00:00:00 Mon 060 01 Mar 2100 12AM 1.3. %",
        ),
    ] {
        assert_eq!(strftime(format, at(seconds)).expect("supported"), expected);
    }
}

#[test]
fn an_unknown_directive_is_an_error() {
    for format in ["%Q", "%", "%-"] {
        assert!(strftime(format, at(0)).is_err(), "{format}");
    }
}

#[test]
fn json_is_written_as_python_writes_it() {
    let source = r#"{{ {"a": [1, 2.5, none, true], "b": {}, "c": "é<'\n"} | tojson }}"#;
    let expected = r#"{"a": [1, 2.5, null, true], "b": {}, "c": "é<'\n"}"#;
    assert_eq!(evaluate(source).expect("renders"), expected);
    let indented = evaluate(r#"{{ {"a": [1, []]} | tojson(indent=2) }}"#).expect("renders");
    assert_eq!(indented, "{\n  \"a\": [\n    1,\n    []\n  ]\n}");
}

#[test]
fn json_of_a_value_that_unfolds_without_end_stops() {
    let doubling = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
    assert!(evaluate(&format!("{doubling}{{{{ ns.x | tojson }}}}")).is_err());
}
