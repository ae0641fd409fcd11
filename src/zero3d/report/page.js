"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 700px)");
  const touch = window.matchMedia("(pointer: coarse)");

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // What the page says of colours and room, over what the figure says of itself.
  const layoutOf = (own) => {
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") };
    const font = { color: colour("--ink"), family: "system-ui, sans-serif", size: narrow.matches ? 11 : 12 };
    return {
      ...own,
      font,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { ...axis, automargin: true, ...own.xaxis },
      yaxis: { ...axis, ...own.yaxis },
      margin: { l: 8, r: 12, t: own.showlegend === false ? 8 : 28, b: 8, autoexpand: true },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", xanchor: "left" },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { ...font, size: 12 } },
      dragmode: touch.matches ? false : "zoom",
    };
  };

  const draw = () => {
    for (const one of figures) {
      const place = document.getElementById(`plot-${one.name}`);
      Plotly.react(place, one.data, layoutOf(one.layout), { responsive: true, displayModeBar: false });
    }
  };

  draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
})();
